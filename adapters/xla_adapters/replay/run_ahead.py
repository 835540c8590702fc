"""`RunAhead`: how far the host may be ahead of the device."""

from __future__ import annotations

import time
from collections.abc import Callable

# Few waits, after each of which the host's caches are cold...
WRITES_KEPT = 8
# ...but for no more steps than pass in this time: whoever saves or stops has to wait for them.
SECONDS_AHEAD = 0.5


class RunAhead:
    """When a step lets go of what its writes replaced.

    From then on `TakenValues` alone holds the values that executions took, and waits for these. How long that takes is
    not to be seen in one place, so what counts is the time between two such moments: the pace of host and device.

    Args:
        clock: the time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._kept = 1
        self._writes = 0
        self._forgot: float | None = None

    def written(self, forget: Callable[[], object]) -> None:
        """One more write is done.

        Args:
            forget: lets go of what all writes so far replaced.
        """
        self._writes += 1
        if self._writes < self._kept:
            return
        forget()
        now = self._clock()
        if self._forgot is not None:
            pace = max((now - self._forgot) / self._writes, 1e-6)
            # The first steps pass fast, whatever the device needs.
            self._kept = max(1, min(WRITES_KEPT, 2 * self._kept, int(SECONDS_AHEAD / pace)))
        self._forgot = now
        self._writes = 0
