"""`Discarding`: a context that discards the open step if its body raises."""

from __future__ import annotations

from types import TracebackType
from typing import Protocol

from xla_adapters.errors import hide_own_frames
from xla_adapters.open_step import step_of_process
from xla_adapters.runtime import get_runtime
from xla_adapters.tracing.interrupts import at_edge
from xla_adapters.utils.patching import with_stack_room
from xla_adapters.utils.torch_modes import TorchModes, finish_interrupted_exits


class Discardable(Protocol):
    """A step that may be open, or several."""

    def abort(self) -> object:
        """Discards the open step."""

    def translate(self, error: BaseException) -> Exception | None:
        """The error to raise in place of another one; `None` to raise that one."""


class Discarding:
    """Discards the open step if the body raises, and raises the error that `translate` returns in its place.

    Args:
        steps: what is discarded.
    """

    def __init__(self, steps: Discardable) -> None:
        self._steps = steps
        self._modes = TorchModes()
        self._around = step_of_process()

    def __enter__(self) -> None:
        pass

    @at_edge
    @with_stack_room
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            return
        ranks = get_runtime().device.ranks
        translated = self._steps.translate(error)
        if translated is None and ranks is not None:
            translated = ranks.lost_by(error)
        finish_interrupted_exits(error)
        try:
            self._steps.abort()
        finally:
            # The step around this one may have ended before it (a generator that is suspended inside a step).
            self._modes.restore(compiling=self._around is step_of_process())
        if ranks is not None:
            ranks.failed(error if translated is None else translated, raised_for=error)
        if translated is not None:
            hide_own_frames(error)
            raise translated from error
