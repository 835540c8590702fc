"""Each exception and warning is explained: on the page of the docs, in the terminal, and by its traceback."""

from __future__ import annotations

import importlib
import pickle
import pkgutil
import re
import traceback

import pytest

import xla_adapters
from tests.error_page import PAGE, page
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
    assert "there are: XLAAdapterError, ConfigError" in capsys.readouterr().err
    assert cli.main(["explain"]) == 0
    assert capsys.readouterr().out.splitlines()[0].startswith("XLAAdapterError ")
