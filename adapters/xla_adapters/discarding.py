"""`Discarding`: what an error in a step does to the step."""

from __future__ import annotations

from types import TracebackType
from typing import Protocol

from xla_adapters.interrupts import at_edge
from xla_adapters.torch_modes import TorchModes, finish_interrupted_exits


class Discardable(Protocol):
    """What may be under way when an error comes: a program, or several together."""

    def abort(self) -> object:
        """Discards it."""

    def translate(self, error: BaseException) -> Exception | None:
        """What an error means in it, or `None` if it is something else."""


class Discarding:
    """Discards what is under way if the body raises, and raises what the error means in a step."""

    def __init__(self, steps: Discardable) -> None:
        self._steps = steps
        self._modes = TorchModes()

    def __enter__(self) -> None:
        pass

    @at_edge
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            return
        translated = self._steps.translate(error)
        finish_interrupted_exits(error)
        try:
            self._steps.abort()
        finally:
            self._modes.put_back()
        if translated is not None:
            raise translated from error
