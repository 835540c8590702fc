"""`run_command`: runs a script as `python` would. `run_limited`: runs a process for a limited time."""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from xla_adapters.errors import ConfigError


def command_of(script: Sequence[str], module: Sequence[str] | None, verb: str) -> list[str]:
    """The command that a command line names.

    Args:
        script: a script and its arguments.
        module: of the option `-m`: a module and its arguments.
        verb: of the command line, for messages.

    Raises:
        ConfigError: there is no such script, or none is named.
    """
    if module:
        return ["-m", *module]
    if not script:
        raise ConfigError(f"{verb}: give the script to {verb}, or -m and a module")
    if not Path(script[0]).is_file():
        raise ConfigError(f"{verb}: there is no file {script[0]}")
    return list(script)


def run_command(command: list[str]) -> None:
    """Runs a script in this process, as `__main__`.

    Args:
        command: the script and its arguments; or `-m`, a module and its arguments.
    """
    if command[0] == "-m":
        sys.argv = command[1:]
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        return
    sys.argv = command
    # As `python SCRIPT` does; with -m it is the present folder, which is there already.
    sys.path[0] = str(Path(command[0]).resolve().parent)
    runpy.run_path(command[0], run_name="__main__")


def run_limited(
    arguments: Sequence[str], *, environment: Mapping[str, str], timeout: float, output: Path | None
) -> str:
    """Runs a Python process, and ends it with the processes that it has started.

    Args:
        arguments: of the interpreter.
        environment: of the process.
        timeout: seconds after which it is ended.
        output: the file for what it prints; None shows it.

    Returns:
        How it ended, in words.
    """
    with Path(os.devnull if output is None else output).open("wb") as printed:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=None if output is None else printed,
            stderr=None if output is None else subprocess.STDOUT,
            env=dict(environment),
            # Its worker processes end with it.
            start_new_session=True,
        )
        try:
            process.wait(timeout)
            return f"was ended by the signal {-process.returncode}" if process.returncode < 0 else "ended"
        except subprocess.TimeoutExpired:
            return f"had no more than {timeout:.0f} s"
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    finally:
        process.wait()
