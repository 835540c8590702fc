"""Lines of native libraries stay out of the terminal, all others reach it."""

from __future__ import annotations

import os

import pytest

from xla_adapters.utils.patching import without_lines


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
