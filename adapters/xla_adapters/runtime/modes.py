"""`eager`: the execution mode, as a context that undoes itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from xla_adapters.errors import UnsupportedOptionError
from xla_adapters.runtime import get_runtime, switch_eager

# Modes of torch_xla: its own lazy one, and its dynamo backend.
_OF_LAZY_TENSORS = ("lazy", "eager+dynamo")


def check_mode(xla_mode: str) -> None:
    """Raises if the runtime does not have a mode.

    Raises:
        UnsupportedOptionError: with the modes that it has.
    """
    runtime = get_runtime()
    if xla_mode in _OF_LAZY_TENSORS and not runtime.has_lazy_tensors:
        raise UnsupportedOptionError(
            f"xla_mode={xla_mode!r}: {runtime.name} has no lazy tensors; use 'eager+compile' (the default) or 'eager'"
        )


@contextmanager
def eager(enabled: bool = True) -> Iterator[None]:
    """Executes operations at once inside the context.

    Where it begins, what was traced before is executed. At the exit the mode is as before.

    Args:
        enabled: False has torch_xla trace operations outside of steps, too, until a value is read or
            `torch_xla.sync()` is called.
    """
    get_runtime().device.initialize()
    previous = get_runtime().tracing.eager()
    try:
        switch_eager(enabled)
        yield
    finally:
        switch_eager(previous)
