"""The line of the user's code that is named, and the text of an argument in it."""

from __future__ import annotations

import json
import pickle
import sys
import traceback
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import typing_extensions

from xla_adapters.errors import GraphBreakWarning, RuntimeOrderError, TensorReadError
from xla_adapters.replay.safety.trusted import is_users_file
from xla_adapters.utils.location import (
    Location,
    argument_text,
    current_location,
    is_plumbing,
    location_of,
    location_of_line,
    place_text,
    warn_at,
)


def here() -> Location | None:
    return current_location()


def test_current_location_is_the_calling_line() -> None:
    location = here()
    assert location is not None
    assert location.filename == __file__
    assert location.function == "here"
    assert location.source == "return current_location()"
    assert location.is_user_code
    assert str(location).startswith(f"{__file__}:{location.lineno} in here")


def test_the_standard_library_is_passed_over() -> None:
    found: list[Location | None] = []
    json.loads("[1]", parse_int=lambda text: found.append(current_location()))
    assert found[0] is not None
    assert found[0].filename == __file__


def test_location_of_an_exception() -> None:
    def fails() -> None:
        raise ValueError

    try:
        fails()
    except ValueError as error:
        location = location_of(error.__traceback__)
    assert location is not None
    assert (location.filename, location.function) == (__file__, "fails")
    assert location_of(None) is None


def test_a_line_in_a_library_says_who_called_it() -> None:
    import transformers.trainer_callback as library

    namespace: dict[str, object] = {"current_location": current_location}
    code = compile("def in_library():\n    return current_location()\n", library.__file__, "exec")
    exec(code, namespace)
    location = namespace["in_library"]()  # type: ignore[operator]
    assert location.filename == library.__file__
    assert not location.is_user_code
    assert location.called_from is not None
    assert location.called_from.filename == __file__
    assert location.called_from.lineno == sys._getframe().f_lineno - 5
    assert "called from" in str(location)


def test_the_wrapper_of_deprecated_functions_is_passed_over() -> None:
    found: list[Location | None] = []

    @typing_extensions.deprecated("as torch_xla's sync functions are", category=None)
    def deprecated() -> None:
        # What a plain function of torch_xla sees: its own lines are passed over.
        namespace: dict[str, object] = {"found": found, "current_location": current_location}
        exec(compile("found.append(current_location())", torch.__file__, "exec"), namespace)

    deprecated()
    assert found[0] is not None
    assert found[0].filename == __file__


@pytest.mark.parametrize(
    ("line", "function", "index", "text"),
    [
        ("x = batch['image'].float()", torch.Tensor.float, 0, "batch['image']"),
        ("x = self.scale.mul(other[0])", torch.Tensor.mul, 1, "other[0]"),
        ("x = torch.where(mask, 0, x)", torch.where, 2, "x"),
        ("x = F.relu(hidden)", torch.nn.functional.relu, 0, "hidden"),
        ("x = a.float() + b.float()", torch.Tensor.float, 0, ""),
        ("x = model(", torch.nn.functional.linear, 0, ""),
        ("x = torch.relu(hidden)", torch.relu, 1, ""),
        ("x = a @ b", torch.Tensor.__matmul__, 0, ""),
    ],
)
def test_what_a_call_gets(line: str, function: Callable[..., Any], index: int, text: str, tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text(f"import torch\n    {line}\n")
    assert argument_text(str(file), 2, function, index) == text


class _Compiler:
    """IPython's, as far as it is asked."""

    def format_code_name(self, filename: str) -> tuple[str, str] | None:
        return ("Cell", "In[7]") if filename == "/tmp/ipykernel_12/345.py" else None


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    shell = types.SimpleNamespace(compile=_Compiler())
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell))
    monkeypatch.setitem(sys.modules, "ipykernel", types.ModuleType("ipykernel"))


@pytest.mark.usefixtures("notebook")
@pytest.mark.parametrize(
    ("place", "text"),
    [
        ("/tmp/ipykernel_12/345.py:4", "Cell In[7], line 4"),
        # Of IPython 7.
        ("<ipython-input-3-0123456789ab>:2", "Cell In[3], line 2"),
        # Of Colab.
        ("/tmp/ipython-input-3-1234567890.py:2", "Cell In[3], line 2"),
        ("<timed exec>:5", "below %%time, line 5"),
        ("/home/me/train.py:9", "/home/me/train.py:9"),
        ("update", "update"),
    ],
)
def test_a_cell_is_named(place: str, text: str) -> None:
    assert place_text(place) == text


@pytest.mark.usefixtures("notebook")
def test_a_warning_names_the_cell() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_at(location_of_line("/tmp/ipykernel_12/345.py", 4), "a read", GraphBreakWarning)
        warn_at(location_of_line("/home/me/train.py", 9), "a read", GraphBreakWarning)
        warn_at(None, "a read", GraphBreakWarning)
    assert [(one.filename, one.lineno) for one in caught][:2] == [("Cell In[7]", 4), ("/home/me/train.py", 9)]


def test_without_ipython_a_line_is_that_of_its_file() -> None:
    assert place_text("/tmp/ipykernel_12/345.py:4") == "/tmp/ipykernel_12/345.py:4"


def test_code_that_was_typed_in_is_the_users() -> None:
    for name in ("<stdin>", "<python-input-0>", "<ipython-input-3-ab>", "<timed exec>"):
        assert not is_plumbing(name)
        assert is_users_file(name)
    assert is_plumbing("<string>")
    assert not is_users_file("<string>")


@pytest.mark.usefixtures("notebook")
def test_in_a_notebook_an_error_of_order_says_to_restart_the_kernel() -> None:
    first = RuntimeOrderError("too late.")
    assert str(first).startswith("too late. In a notebook: restart the kernel")
    assert str(RuntimeOrderError(str(first))) == str(first)
    assert str(pickle.loads(pickle.dumps(first))) == str(first)


def test_elsewhere_it_does_not() -> None:
    assert str(RuntimeOrderError("too late.")) == "too late."


def test_frames_of_libraries_are_left_out_of_tracebacks() -> None:
    import transformers.trainer_callback as library

    def raises() -> None:
        raise TensorReadError("a read")

    namespace: dict[str, Any] = {"raises": raises, "__name__": "transformers.trainer_callback"}
    exec(compile("def in_library():\n    raises()\n", library.__file__, "exec"), namespace)
    with pytest.raises(TensorReadError) as caught:
        namespace["in_library"]()
    frames = {frame.f_code.co_name: frame for frame, _ in traceback.walk_tb(caught.value.__traceback__)}
    assert frames["in_library"].f_locals["__tracebackhide__"]
    assert "__tracebackhide__" not in frames["raises"].f_locals
    # Of a module it would be an attribute.
    assert not hasattr(library, "__tracebackhide__")
