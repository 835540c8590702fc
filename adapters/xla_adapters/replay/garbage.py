"""Python's search for unreachable cycles, put off while a pass holds a tensor for each value of the state."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collecting() -> Iterator[None]:
    """No cycles are searched for in the context.

    A replayed pass makes two tensors for each parameter and each part of its optimizer's state. They die with the pass,
    without a search, but so many at once set searches off, which find them all alive and keep them for the long one
    through everything that the process holds.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
