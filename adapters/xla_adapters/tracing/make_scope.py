"""The scopes of a step by the runtime in use (`make_scope`), and those of the modes that guard and undo nothing."""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

import torch

from xla_adapters.errors import UnsupportedOptionError
from xla_adapters.runtime import eager, get_runtime
from xla_adapters.tracing.activation_checkpointing import checkpointing_on_device
from xla_adapters.tracing.placeholders.scope import PlaceholderScope
from xla_adapters.tracing.scope_report import NOTHING_COMPILED, ScopeReport
from xla_adapters.tracing.step_scope import StepScope


class UntracedScope:
    """A call of a step on a runtime that cannot trace: each operation is executed at once, and nothing is undone."""

    executed = False

    def __init__(self) -> None:
        self.is_open = False
        self._restores = ExitStack()

    def open(self) -> None:
        """Begins the call."""
        self._restores.enter_context(torch.autograd.set_multithreading_enabled(False))
        self.is_open = True

    def close(self) -> ScopeReport:
        """Ends it."""
        self.abort()
        self.executed = True
        return NOTHING_COMPILED

    def abort(self) -> None:
        """Ends it; what was executed stays."""
        self.is_open = False
        self._restores.close()

    def translate(self, error: BaseException) -> Exception | None:
        """No error is another one's."""
        return None

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.abort()


def make_scope(**options: Any) -> StepScope | UntracedScope:
    """The scope of one traced call of a step.

    Args:
        **options: as for `StepScope`.
    """
    runtime = get_runtime()
    if runtime.has_placeholders:
        return PlaceholderScope(**options)
    return StepScope(**options) if runtime.has_executables else UntracedScope()


# ---- xla_mode="eager" and "lazy" ---------------------------------------------------------------------


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
