"""`eager`: the execution mode, as a context that undoes itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from xla_adapters.runtime import get_runtime, switch_eager


@contextmanager
def eager(enabled: bool = True) -> Iterator[None]:
    """Executes operations at once inside the context (or, with `False`, traces them).

    Nothing is pending in eager mode: where it begins, what was traced before is executed.
    """
    get_runtime().device.initialize()
    previous = get_runtime().tracing.eager()
    try:
        switch_eager(enabled)
        yield
    finally:
        switch_eager(previous)
