"""`TakenValues`: what executions under way have taken."""

from __future__ import annotations

from collections import deque

import torch

# One is executed, one is ready to follow it.
EXECUTIONS_KEPT = 2


class TakenValues:
    """What the last executions took the buffers of lives on until others have followed.

    Whoever lets go of such a value waits until the execution that took it is over (`CommonPjRtBuffer::ReleaseBuffer` in
    PJRT waits for the donation). Were it let go of at once, the host would prepare no step while the device executes
    one, and the device would stand still while the host does.

    Args:
        executions: how many.
    """

    def __init__(self, executions: int = EXECUTIONS_KEPT) -> None:
        self._taken: deque[list[torch.Tensor]] = deque(maxlen=executions)

    def add(self, values: list[torch.Tensor]) -> None:
        """The values that the latest execution has taken. Waits for the one of which others have followed."""
        self._taken.append(values)
