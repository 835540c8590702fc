"""`make_scope`: the scope that traces a step on the runtime in use."""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

import torch

from xla_adapters.runtime import get_runtime
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
