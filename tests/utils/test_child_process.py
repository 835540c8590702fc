"""Processes of their own: how they end, and what they answer."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from xla_adapters.utils.child_process import Asked, Ended, ask, python_path, run_python

ENVIRONMENT = {**os.environ, "PYTHONPATH": python_path()}


def run(program: str, timeout: float = 100) -> Ended:
    return run_python(["-c", program], environment=ENVIRONMENT, timeout=timeout)


@pytest.mark.parametrize(
    ("program", "how"),
    [
        ("print('done')", "ended"),
        ("print('done'); raise SystemExit(3)", "ended with status 3"),
        ("import os; print('done', flush=True); os.abort()", "ended with status -6"),
        ("import os; print('done', flush=True); os.kill(os.getpid(), 9)", "was killed, as a machine does that is"),
    ],
)
def test_how_it_ended_and_what_it_printed_is_told(program: str, how: str) -> None:
    ended = run(program)
    assert ended.how.startswith(how)
    assert str(ended) == f"{ended.how}; it printed:\ndone"


def test_what_takes_too_long_is_ended_with_its_children(tmp_path: Path) -> None:
    number = tmp_path / "number"
    program = f"""
import subprocess, sys, pathlib
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
pathlib.Path({str(number)!r}).write_text(str(child.pid))
child.wait()
"""
    ended = run_python(
        ["-c", program],
        environment=ENVIRONMENT,
        timeout=500,
        until=lambda: number.is_file() and bool(number.read_text()),
    )
    assert ended.was_stopped
    child, deadline = Path(f"/proc/{number.read_text()}/stat"), time.monotonic() + 60
    while child.exists() and ") Z " not in child.read_text() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not child.exists() or ") Z " in child.read_text()
    assert str(run("import time; time.sleep(600)", timeout=0.01)) == "had no more than 0.01 s (its timeout)"


def letters(asked: Asked) -> None:
    """What the process of the next test does."""
    for letter in asked.request.decode():
        assert letter != "!", "no letter"
        asked.answer(letter.encode())


def mode(asked: Asked) -> None:
    """What the process of the next test does."""
    asked.answer(oct(asked.folder.stat().st_mode & 0o777).encode())


def test_nobody_else_reads_or_writes_what_is_asked_and_answered() -> None:
    before = os.umask(0)
    try:
        assert ask(mode, b"", environment=ENVIRONMENT, timeout=100).answers == [b"0o700"]
    finally:
        os.umask(before)


def test_answers_are_kept_if_the_process_fails() -> None:
    assert ask(letters, b"abc", environment=ENVIRONMENT, timeout=100).answers == [b"a", b"b", b"c"]
    ended = ask(letters, b"ab!c", environment=ENVIRONMENT, timeout=100)
    assert ended.answers == [b"a", b"b"]
    assert ended.how == "ended with status 1"
    assert "AssertionError: no letter" in ended.output
