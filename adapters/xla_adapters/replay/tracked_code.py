"""`TrackedCode`: the user code of a step, analysed once, and again when something that it reads has changed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from xla_adapters.replay.safety import Examine, FrameworkModel, Verdict, analyze
from xla_adapters.replay.safety.guards import ReadGuards, named_guards

# After changes before so many steps in a row, the code counts as changing always: it is not analysed for a while.
_UNSTEADY = 8
# So many steps later it is analysed again.
_PAUSE = 32


class TrackedCode:
    """Says of the user code in one kind of step whether replays may skip it, and when something that it reads changes.

    Args:
        framework: describes the framework around the code.
        examine: passes its functions to an analysis.
        promised: functions that the user promises to be safe (`step_replay=True`). They are not analysed; only the
            globals and closure variables that they name are guarded.

    Attributes:
        reason: what a replay would skip or get wrong, with file and line; None if nothing.
        generation: how often something that the code reads has changed.
        change: what changed before the present step, in words, or None.
    """

    def __init__(
        self,
        framework: FrameworkModel,
        examine: Examine,
        *,
        promised: Sequence[Callable[..., object]] | None = None,
    ) -> None:
        self._framework = framework
        self._examine = examine
        self._promised = promised
        self.reason: str | None = None
        self.generation = 0
        self.change: str | None = None
        self._changes = 0
        self._pause = 0
        self._analyse()

    @property
    def modules(self) -> Sequence[torch.nn.Module]:
        """The modules that the code uses."""
        return self._verdict.modules

    @property
    def tensors(self) -> Sequence[torch.Tensor]:
        """The tensors from outside of the step that the code reads and that are in no module."""
        return self._verdict.tensors

    def follow(self) -> str | None:
        """Analyses the code again if something that it reads has changed; returns what did, in words, or None."""
        self.change = None
        if self._pause:
            self._pause -= 1
            if not self._pause:
                self._changes = _UNSTEADY - 1
                self.generation += 1
                self._analyse()
            return None
        self.change = next((change for guards in self._guards if (change := guards.changed()) is not None), None)
        if self.change is None:
            self._changes = 0
            return None
        self._changes += 1
        self.generation += 1
        if self._changes < _UNSTEADY or self._promised is not None:
            self._analyse()
        else:
            # Capturing each step costs more than only tracing it.
            self._pause = _PAUSE
            self.reason = self.reason or f"before each of {_UNSTEADY} steps in a row, {self.change}"
        return self.change

    def look_again(self) -> None:
        """Analyses the code again after a change that its guards do not see (a module was replaced, for example)."""
        if not self._pause:
            self._analyse()

    def _analyse(self) -> None:
        if self._promised is not None:
            self._verdict = Verdict(None, ReadGuards(), (), ())
            self._guards = [named_guards(function) for function in self._promised]
        else:
            self._verdict = analyze(self._examine, self._framework)
            self._guards = [self._verdict.guards]
        self.reason = self._verdict.reason
        if self.reason is not None:
            self._verdict.guards.release()
