"""What is replaced comes back, and is said if it is not there. Lines of native libraries stay out of the terminal."""

from __future__ import annotations

import os
import warnings
from types import ModuleType

import pytest

from xla_adapters.errors import LibraryVersionWarning
from xla_adapters.utils.patching import replaced, without_lines


def _replace_twice(module: ModuleType) -> None:
    for _ in range(2):
        with replaced(module, "_gone", 2):
            assert module._gone == 2


def test_a_name_that_a_library_no_longer_has_is_said_once() -> None:
    module = ModuleType("lightning.of_tests")
    module.kept = 1  # type: ignore[attr-defined]
    with pytest.warns(LibraryVersionWarning, match=r"lightning 2\.\d.* has no _gone in lightning\.of_tests") as warned:
        _replace_twice(module)
    assert len(warned) == 1
    assert not hasattr(module, "_gone")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with replaced(module, "kept", 2):
            assert module.kept == 2
        # Attributes of objects and functions may be set that were not there.
        with replaced(_replace_twice, "mark", 2):
            assert _replace_twice.mark == 2  # type: ignore[attr-defined]
    assert module.kept == 1


@pytest.mark.parametrize("fails", [False, True])
def test_only_lines_with_the_prefix_are_left_out(capfd: pytest.CaptureFixture[str], fails: bool) -> None:
    print("before")
    try:
        with without_lines("Solver::"):
            os.write(1, b"Solver::tries again\n")
            print("a progress bar")
            os.write(1, b"of another thread: Solver::\n")
            if fails:
                raise ValueError("the test's own")
    except ValueError:
        assert fails
    print("behind")
    assert capfd.readouterr().out.splitlines() == [
        "before",
        "a progress bar",
        "of another thread: Solver::",
        "behind",
    ]
