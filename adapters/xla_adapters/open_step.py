"""Whether a step is open in this thread. Tracing sets it; rooms below and beside tracing only ask.

What must not happen inside a step (a save, say) can refuse without knowing how steps are traced.

Only one thread can be inside a step, because the switches that a step sets apply to the process.
"""

from __future__ import annotations

import threading
from typing import Protocol

from xla_adapters.errors import ConcurrentStepError


class OpenStep(threading.local):
    """The outermost step that this thread is in.

    Attributes:
        step: what traces it; `None` outside of steps.
        is_replay: whether it is replayed; then nothing traces it, and its Python computes nothing.
    """

    step: object | None = None
    is_replay = False


open_step = OpenStep()


def in_step() -> bool:
    """Whether this thread is inside a step that is being traced."""
    return open_step.step is not None


class OnlyStep(Protocol):
    """A step that is the only one in the process while it is open."""

    name: str

    def abort(self) -> None:
        """Discards the step."""


_lock = threading.Lock()
_only_step: tuple[threading.Thread, OnlyStep] | None = None


def begin_only_step(step: OnlyStep) -> None:
    """Makes a step the only one of the process. If another one is open whose thread has ended, discards that.

    Raises:
        ConcurrentStepError: another thread is inside a step.
    """
    global _only_step
    thread = threading.current_thread()
    with _lock:
        if _only_step is not None:
            owner, other = _only_step
            if owner.is_alive():
                raise ConcurrentStepError(
                    f"the step {step.name!r} cannot begin in thread {thread.name!r}: thread {owner.name!r} is "
                    f"inside the step {other.name!r}, and what a step traces belongs to the whole process. Run steps "
                    "in one thread, or take turns with a lock."
                )
            other.abort()
        _only_step = (thread, step)


def step_of_process() -> OnlyStep | None:
    """The step that the process is in, if any."""
    return _only_step[1] if _only_step is not None else None


def end_only_step(step: OnlyStep) -> None:
    """Lets other steps begin, if this one is the only one of the process."""
    global _only_step
    if _only_step is not None and _only_step[1] is step:
        _only_step = None
