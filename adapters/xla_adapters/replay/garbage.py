"""`without_collecting`: no garbage collection during a replay."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collecting() -> Iterator[None]:
    """Disables Python's cyclic garbage collector in the context.

    A replayed call makes two tensors for each parameter and each tensor of the optimizer's state. Reference counting
    frees them at the end of the call. But so many new objects trigger collections, which find all of them in use and
    promote them to the oldest generation, whose collection takes long.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
