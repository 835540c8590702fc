"""Keeps lines that a native library prints out of the user's terminal."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

_STDOUT = 1


@contextmanager
def without_lines(prefix: str) -> Iterator[None]:
    """Inside the context, lines that begin with a prefix are not written to the process's standard output.

    Everything else that is written meanwhile, by other threads too, appears at the exit.

    Args:
        prefix: the beginning of the lines.
    """
    sys.stdout.flush()
    terminal = os.dup(_STDOUT)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), _STDOUT)
        try:
            yield
        finally:
            sys.stdout.flush()
            os.dup2(terminal, _STDOUT)
            os.close(terminal)
            file.seek(0)
            for line in file:
                if not line.startswith(prefix.encode()):
                    os.write(_STDOUT, line)
