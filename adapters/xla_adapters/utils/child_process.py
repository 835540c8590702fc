"""Runs Python in a process of its own, for a limited time: `run_python` any program, `ask` a function of a module."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path

_POLL_SECONDS = 0.2
_STOPPED = "was stopped"
_KEPT = 2000
_REQUEST = "request"
_SERVE = f"from {__name__} import _serve; _serve()"


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a process ended.

    Attributes:
        how: in words that follow what the process is: `"ended with status 1"`.
        printed: what it printed; empty if that was shown.
        was_stopped: whether it was ended because of `until`.
        answers: what it answered until then; see `ask`.
    """

    how: str
    printed: str = ""
    was_stopped: bool = False
    answers: Sequence[bytes] = ()

    @property
    def output(self) -> str:
        """The end of what it printed, to follow a message; empty if it printed nothing."""
        text = self.printed.strip()[-_KEPT:]
        return f"; it printed:\n{text}" if text else ""

    def __str__(self) -> str:
        return self.how + self.output


@dataclass(frozen=True)
class Asked:
    """What a process was asked, as `ask` calls a function there.

    Attributes:
        request: the question.
        folder: for temporary files; it goes with the process.
    """

    request: bytes
    folder: Path

    def answer(self, data: bytes) -> None:
        """Gives an answer; the process may give any number, and may be ended at any time."""
        part = self.folder / "part"
        part.write_bytes(data)
        # Renamed when it is complete.
        part.rename(self.folder / f"answer_{len(list(self.folder.glob('answer_*'))):04}")


def run_python(
    arguments: Sequence[str],
    *,
    environment: Mapping[str, str],
    timeout: float,
    shows_output: bool = False,
    until: Callable[[], bool] | None = None,
) -> Ended:
    """Runs a Python process, and ends it with the processes that it has started.

    Args:
        arguments: of the interpreter.
        environment: of the process.
        timeout: seconds after which it is ended.
        shows_output: whether what it prints goes where this process prints.
        until: the process is also ended as soon as this returns True.
    """
    deadline = time.monotonic() + timeout
    with tempfile.TemporaryFile() as printed:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=None if shows_output else printed,
            stderr=None if shows_output else subprocess.STDOUT,
            env=dict(environment),
            # Its worker processes end with it.
            start_new_session=True,
        )
        try:
            how = _wait(process, deadline, until) or f"had no more than {timeout:g} s (its timeout)"
        finally:
            _end(process)
        printed.seek(0)
        text = printed.read().decode(errors="replace")
    return Ended(how=how, printed=text, was_stopped=how == _STOPPED)


def ask(
    work: Callable[[Asked], None],
    request: bytes,
    *,
    environment: Mapping[str, str],
    timeout: float,
    shows_output: bool = False,
) -> Ended:
    """Has a function answer a request in a process of its own.

    The process is left as soon as the function returns: nothing is destroyed, no thread is joined.

    Args:
        work: a function of a module, which the process imports by its name.
        request: for it.
        environment, timeout, shows_output: as for `run_python`.
    """
    with tempfile.TemporaryDirectory(prefix="xla-adapters-") as folder:
        Path(folder, _REQUEST).write_bytes(request)
        ended = run_python(
            ["-c", _SERVE, work.__module__, work.__qualname__, folder],
            environment=environment,
            timeout=timeout,
            shows_output=shows_output,
        )
        answers = [path.read_bytes() for path in sorted(Path(folder).glob("answer_*"))]
    return replace(ended, answers=answers)


def python_path() -> str:
    """The variable `PYTHONPATH` with which a process finds the modules that this one finds."""
    return os.pathsep.join(entry for entry in sys.path if entry)


def _wait(process: subprocess.Popen[bytes], deadline: float, until: Callable[[], bool] | None) -> str:
    """How the process ended; empty if it has not."""
    while (left := deadline - time.monotonic()) > 0:
        try:
            status = process.wait(left if until is None else min(_POLL_SECONDS, left))
        except subprocess.TimeoutExpired:
            if until is not None and until():
                return _STOPPED
            continue
        if status == -signal.SIGKILL:
            return "was killed, as a machine does that is out of memory"
        return f"ended with status {status}" if status else "ended"
    return ""


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    finally:
        process.wait()


def _serve() -> None:
    """What the process of `ask` runs."""
    module, name, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    getattr(import_module(module), name)(Asked((folder / _REQUEST).read_bytes(), folder))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
