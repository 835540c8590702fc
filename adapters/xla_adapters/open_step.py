"""Whether a step is open in this thread. Tracing sets it; rooms below and beside tracing only ask.

What must not happen inside a step (a save, say) can refuse without knowing how steps are traced.
"""

from __future__ import annotations

import threading


class OpenStep(threading.local):
    """The outermost step that this thread is in.

    Attributes:
        step: what traces it; `None` outside of steps.
    """

    step: object | None = None


open_step = OpenStep()


def in_step() -> bool:
    """Whether this thread is inside a step that is being traced."""
    return open_step.step is not None
