"""Each exception and warning is explained: on the page of the docs, in the terminal, and by its traceback."""

from __future__ import annotations

import importlib
import pickle
import pkgutil
import re
import traceback
from collections.abc import Callable

import pytest
import torch

import xla_adapters
from tests.error_page import MESSAGES, PAGE, messages_in, messages_page, page
from tests.isolation import isolated
from xla_adapters import cli, errors
from xla_adapters.errors import ConfigError, GraphBreakError, TensorReadError, XLAAdapterError, entry, explained
from xla_adapters.runtime import compile_cache


def _all_subclasses(cls: type) -> set[type]:
    return {found for below in cls.__subclasses__() for found in (below, *_all_subclasses(below))}


def test_the_page_is_what_the_classes_say() -> None:
    assert PAGE.read_text() == page(), "run python -m tests.error_page"


def test_the_page_has_one_entry_for_each_class_and_no_other() -> None:
    listed = re.findall(r"^## (\w+)$", PAGE.read_text(), re.MULTILINE)
    assert listed == list(explained())
    # Of the whole package, not of the one file alone.
    for found in pkgutil.walk_packages(xla_adapters.__path__, "xla_adapters."):
        # Only the other environment has TorchTPU, and only an installation has hatchling.
        if not found.name.startswith(("xla_adapters.runtime.torch_tpu.", f"{compile_cache.__name__}.build_plugin")):
            importlib.import_module(found.name)
    shipped = {cls for cls in _all_subclasses(XLAAdapterError) if cls.__module__.startswith("xla_adapters.")}
    assert {name for name in listed if name.endswith("Error")} == {cls.__name__ for cls in shipped} | {
        "XLAAdapterError"
    }


@pytest.mark.parametrize("name", list(explained()))
def test_an_entry_says_what_to_do(name: str) -> None:
    assert re.search(r"\n\nWhat to do: \S", entry(name))
    assert "Attributes:" not in entry(name)


def test_a_traceback_names_the_entry() -> None:
    shown = "".join(traceback.format_exception(TensorReadError("a read", filename="train.py", lineno=3)))
    assert "xla-adapters explain TensorReadError" in shown.splitlines()[-1]
    assert str(TensorReadError("a read")) == "a read"


def test_a_class_that_is_not_explained_names_the_one_above() -> None:
    class OfAUser(GraphBreakError): ...

    assert OfAUser("a read").__notes__ == GraphBreakError("a read").__notes__


def test_errors_of_the_system_keep_their_arguments() -> None:
    error = errors.CheckpointWriteError(28, "No space left on device")
    assert (error.errno, error.strerror) == (28, "No space left on device")
    assert len(error.__notes__) == 1
    assert pickle.loads(pickle.dumps(ConfigError("wrong"))).__notes__ == ConfigError("wrong").__notes__


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", "tensorreaderror"]) == 0
    assert "Read it after the step".lower() in capsys.readouterr().out.lower()
    assert cli.main(["explain", "TensorError"]) == 2
    assert "near: HostTensorError, TensorReadError, SolverError. " in capsys.readouterr().err
    assert cli.main(["explain", "Expected XLA tensor. Got: torch.FloatTensor"]) == 2
    said = capsys.readouterr().err
    assert "there are: XLAAdapterError, ConfigError" in said
    assert "docs/reference/messages.md" in said
    assert cli.main(["explain"]) == 0
    assert capsys.readouterr().out.splitlines()[0].startswith("XLAAdapterError ")


def test_messages_are_found_by_their_text() -> None:
    text = MESSAGES.read_text()
    assert text == messages_page(), "run python -m tests.error_page"
    listed = re.findall(r"^### (\w+): what it says\n\n\[.*\]\(errors\.md#(\w+)\)", text, re.MULTILINE)
    assert all(name.lower() == anchor for name, anchor in listed)
    # The base is not raised itself; a mismatch that only warns says what the error says.
    assert {*explained()} - {name for name, _ in listed} == {"XLAAdapterError", "ReplayMismatchWarning"}
    assert "- tensor read inside the step …: …" in text


def test_a_message_is_its_first_sentence_with_gaps_for_what_varies() -> None:
    source = """
_HELP = "use that"
def check(value, names):
    if value:
        raise ConfigError(f"option={value!r} is wrong: {_HELP}. More of it")
    message = "it took " + str(value)
    raise errors.StallError(message)
    warn_at(where, f"{len(names)} left out\\nnames", CheckpointWarning)
    raise ConfigError(str(value))
    raise ValueError("of Python")
"""
    assert sorted(messages_in(source)) == [
        ("CheckpointWarning", "… left out"),
        ("ConfigError", "option=… is wrong: use that"),
        ("StallError", "it took …"),
    ]


def _cpu_batch() -> None:
    xla_adapters.initialize()
    torch.nn.Linear(2, 2).to("xla")(torch.ones(1, 2))


def _convolution() -> None:
    xla_adapters.initialize()
    torch.nn.Conv1d(1, 8, 5).to("xla")(torch.ones(8, 1, 32))


def _early_backward() -> None:
    import torch_xla  # noqa: F401 (registers the device)

    torch.ones(2, requires_grad=True).sum().backward()
    torch.ones(2, device="xla", requires_grad=True).sum().backward()


def _fused() -> None:
    xla_adapters.initialize()
    weight = torch.ones(2, device="xla", requires_grad=True)
    weight.sum().backward()
    torch.optim.AdamW([weight], fused=True).step()


def _export() -> None:
    xla_adapters.initialize()
    torch.export.export(torch.nn.Embedding(2, 2).to("xla"), (torch.zeros(1, dtype=torch.long),))


def _spawn() -> None:
    from torch_xla.distributed import xla_multiprocessing

    xla_multiprocessing.spawn(_cpu_batch, nprocs=2)


@pytest.mark.parametrize("provoke", [_cpu_batch, _convolution, _early_backward, _fused, _export, _spawn])
@isolated
def test_messages_of_torch_are_as_the_page_has_them(provoke: Callable[[], None]) -> None:
    headings = re.findall(r"^### (.*)$", MESSAGES.read_text().partition("## Messages of this package")[0], re.MULTILINE)
    assert len(headings) == 14
    said = [heading.replace("`", "").split("…") for heading in headings]
    with pytest.raises((RuntimeError, ValueError)) as raised:
        provoke()
    message = str(raised.value).replace("`", "")
    assert any(all(part in message for part in parts) for parts in said), message
