"""`TrainerCall`: a call of `fit`, `validate`, `test` or `predict` of a Trainer, and whether it has ended."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from types import FrameType

from lightning.pytorch import Trainer
from lightning.pytorch.trainer.call import _call_and_handle_interrupt

_CALL = _call_and_handle_interrupt.__code__


class TrainerCall:
    """The innermost call of a Trainer's methods that is under way in this thread.

    Lightning's handling of an exception may fail itself, as near the recursion limit. Then it calls no `teardown`, and
    only the stack tells that the call has ended.

    Args:
        trainer: whose method it is.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._thread = threading.current_thread()
        self._frame = next((frame for frame in _calls() if frame.f_locals["trainer"] is trainer), None)

    @property
    def has_ended(self) -> bool:
        """Whether the method was left. False for the call of another thread, and for one that was not found."""
        is_here = self._thread is threading.current_thread()
        return is_here and self._frame is not None and not any(frame is self._frame for frame in _calls())


def _calls() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _CALL:
            yield frame
        frame = frame.f_back
