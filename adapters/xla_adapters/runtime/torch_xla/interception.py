"""`intercepted`: reports calls of torch_xla's own API."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch_xla
import torch_xla.debug.profiler as xla_profiler

from xla_adapters.runtime.interface import RuntimeEvent

_C = torch_xla._XLAC
_SYNC_CALLS = ("_xla_step_marker", "_xla_sync_multi", "_xla_sync_live_tensors")


@contextmanager
def intercepted(notify: Callable[[RuntimeEvent, object], bool]) -> Iterator[None]:
    """See `Tracing.intercept`."""

    def reporting(event: RuntimeEvent, call: Callable[..., Any]) -> Callable[..., Any]:
        def reported(*args: Any, **kwargs: Any) -> Any:
            return call(*args, **kwargs) if notify(event, args[0] if args else None) else None

        return reported

    patches: list[tuple[Any, str, RuntimeEvent]] = [(_C, name, RuntimeEvent.SYNC) for name in _SYNC_CALLS]
    patches.append((_C, "_xla_wait_device_ops", RuntimeEvent.WAIT))
    patches.append((xla_profiler.Trace, "__enter__", RuntimeEvent.PROFILER_ENTER))
    patches.append((xla_profiler.Trace, "__exit__", RuntimeEvent.PROFILER_EXIT))
    originals = [(owner, name, getattr(owner, name)) for owner, name, _ in patches]
    try:
        for owner, name, event in patches:
            setattr(owner, name, reporting(event, getattr(owner, name)))
        yield
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)
