"""`compile_progress`: a live line on the terminal while a step compiles for long."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from xla_adapters.tracing.graph_history import GraphHistory, StepSignature
from xla_adapters.tracing.operation_log import Call, OperationLog

THREAD_NAME = "xla-adapters compile progress"
# Seconds until the line appears, and between its updates.
_APPEARS_AFTER = 5.0
_INTERVAL = 1.0
# Clears the line that the cursor is in; a progress bar there draws itself anew at its next update.
_CLEAR = "\r\x1b[2K"


@contextmanager
def compile_progress(
    name: str, history: GraphHistory, call: tuple[StepSignature, OperationLog], stream: TextIO | None = None
) -> Iterator[None]:
    """Shows how long the step has been compiling, from five seconds on, and clears the line at the end.

    Does nothing if the stream is no terminal, or if a call with the same signature has compiled before: starting the
    thread that draws would cost such a call a tenth of a millisecond.

    Args:
        name: of the step.
        history: the graphs of the step.
        call: what is known of the call from outside, and what it did.
        stream: where to draw; `sys.stderr` if not given.
    """
    # None in programs without a console.
    stream = sys.stderr if stream is None else stream
    signature, operations = call
    if stream is None or not stream.isatty() or any(signature == known for known, _ in history.known):
        yield
        return
    is_over = threading.Event()
    drawing = (stream, name, operations, is_over)
    thread = threading.Thread(target=_draw, args=drawing, name=THREAD_NAME, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def _draw(stream: TextIO, name: str, operations: OperationLog, is_over: threading.Event) -> None:
    started = time.monotonic()
    if is_over.wait(_APPEARS_AFTER):
        return
    calls = sum(isinstance(entry, Call) for entry in operations.entries)
    while True:
        seconds = int(time.monotonic() - started)
        text = f"{name}: compiling for {seconds} s, a graph of {calls:,} calls of torch"
        # A line that wraps could not be cleared. A terminal of unknown size has 0 columns.
        columns = os.get_terminal_size(stream.fileno()).columns or 80
        _write(stream, _CLEAR + text[: columns - 1])
        if is_over.wait(_INTERVAL):
            _write(stream, _CLEAR)
            return


def _write(stream: TextIO, text: str) -> None:
    stream.write(text)
    stream.flush()
