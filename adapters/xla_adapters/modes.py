"""The execution modes outside a compiled step, each as a context that undoes itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import TracebackType

import torch

from xla_adapters.backend import get_backend


@contextmanager
def eager(enabled: bool = True) -> Iterator[None]:
    """Executes operations at once inside the context (or, with `False`, traces them)."""
    backend = get_backend()
    backend.initialize()
    previous = backend.eager()
    backend.set_eager(enabled)
    try:
        yield
    finally:
        backend.set_eager(previous)


class EagerScope:
    """A step of `xla_mode="eager"`: every operation executes at once."""

    def __init__(self) -> None:
        self._restores = ExitStack()

    def __enter__(self) -> EagerScope:
        self._restores.enter_context(eager())
        self._restores.enter_context(torch.autograd.set_multithreading_enabled(False))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._restores.close()


class LazyScope:
    """A step of `xla_mode="lazy"`: traced without guards, reads allowed, synced at the end.

    An exception leaves what was traced pending, as torch_xla does.
    """

    def __init__(self) -> None:
        self._restores = ExitStack()

    def __enter__(self) -> LazyScope:
        self._restores.enter_context(eager(False))
        self._restores.enter_context(torch.autograd.set_multithreading_enabled(False))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if error is None:
                get_backend().finish_step()
        finally:
            self._restores.close()
