"""The steps of `xla_mode="eager"` and `"lazy"`: nothing is guarded, and nothing undone after an error."""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType
from typing import Self

import torch

from xla_adapters.errors import UnsupportedOptionError
from xla_adapters.runtime import get_runtime
from xla_adapters.runtime.modes import eager
from xla_adapters.tracing.activation_checkpointing import checkpointing_on_device


def check_lazy_mode() -> None:
    """Raises UnsupportedOptionError on a runtime that has no lazy tensors."""
    runtime = get_runtime()
    if not runtime.has_executables:
        raise UnsupportedOptionError(
            f"xla_mode='lazy': {runtime.name} has no lazy tensors; use 'eager+compile' (the default) or 'eager'"
        )


class _UnguardedScope:
    def __init__(self, *, eagerly: bool) -> None:
        self._eagerly = eagerly
        self._restores = ExitStack()

    def __enter__(self) -> Self:
        self._restores.enter_context(eager(self._eagerly))
        self._restores.enter_context(torch.autograd.set_multithreading_enabled(False))
        if get_runtime().has_executables:
            self._restores.enter_context(checkpointing_on_device())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if error is None and not self._eagerly:
                get_runtime().tracing.finish_step()
        finally:
            self._restores.close()


class EagerScope(_UnguardedScope):
    """A step of `xla_mode="eager"`: every operation executes at once."""

    def __init__(self) -> None:
        super().__init__(eagerly=True)


class LazyScope(_UnguardedScope):
    """A step of `xla_mode="lazy"`: traced without guards, reads allowed, synced at the end.

    An exception leaves what was traced pending, as torch_xla does.
    """

    def __init__(self) -> None:
        super().__init__(eagerly=False)
