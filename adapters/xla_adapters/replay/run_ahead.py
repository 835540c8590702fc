"""`RunAhead`: how far the host may be ahead of the device."""

from __future__ import annotations

import time
from collections.abc import Callable

# Few waits, after each of which the host's caches are cold...
WRITES_KEPT = 8
# ...but no more steps than the device does in this time: whoever saves or stops has to wait for them.
SECONDS_AHEAD = 0.5


class RunAhead:
    """When a step lets go of what its writes replaced: this waits for all but the last executions (see `TakenValues`).

    Args:
        clock: the time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._kept = WRITES_KEPT
        self._writes = 0

    def written(self, forget: Callable[[], object]) -> None:
        """One more write is done.

        Args:
            forget: lets go of what all writes so far replaced.
        """
        self._writes += 1
        if self._writes < self._kept:
            return
        began = self._clock()
        forget()
        waited = self._clock() - began
        self._kept = min(WRITES_KEPT, max(1, int(SECONDS_AHEAD * self._writes / max(waited, 1e-9))))
        self._writes = 0
