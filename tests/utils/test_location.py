"""The line of the user's code that is named, and the text of an argument in it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import typing_extensions

from xla_adapters.utils.location import Location, argument_text, current_location, location_of


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
