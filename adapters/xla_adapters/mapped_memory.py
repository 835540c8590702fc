"""`MappedMemory`: notices that the system maps a step's memory anew in each, and says what spares it."""

from __future__ import annotations

import logging
import resource
from collections.abc import Callable
from itertools import pairwise

from xla_adapters.backend import get_backend

logger = logging.getLogger("xla_adapters")

# Steps behind which it is looked. The first ones compile, and the host may be some dozens ahead of the device (PJRT's
# CPU client allows 32). What is compiled later, for an evaluation say, maps much too, but not in two stretches.
_MARKS = (40, 100, 160)
# Less than this the allocator keeps (`xla_adapters.backend.host_memory`).
_MUCH = 64 << 20


def _mapped() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt * resource.getpagesize()


class MappedMemory:
    """Watches over a program's first steps.

    Args:
        mapped: bytes that the system has mapped for the process so far.
        is_spared: whether larger pages could be had.
    """

    def __init__(
        self,
        mapped: Callable[[], int] = _mapped,
        is_spared: Callable[[], bool] = lambda: get_backend().could_have_huge_pages(),
    ) -> None:
        self._mapped = mapped
        self._is_spared = is_spared
        self._steps = 0
        self._totals: list[int] = []

    def step_ended(self, name: str) -> None:
        """Counts; behind the last step that is watched a warning says what was found.

        Args:
            name: of the step.
        """
        self._steps += 1
        if self._steps not in _MARKS:
            return
        self._totals.append(self._mapped())
        if len(self._totals) < len(_MARKS):
            return
        steps = zip(pairwise(self._totals), pairwise(_MARKS), strict=True)
        each = min((after - before) / (last - first) for (before, after), (first, last) in steps)
        if each > _MUCH and self._is_spared():
            logger.warning(
                "%s: the system maps %d MB of memory anew in each step, page by page, which can take as long as what "
                "is computed there. Start Python with GLIBC_TUNABLES=glibc.malloc.hugetlb=1 in its environment: pages "
                "are of 2 MB then (glibc reads it once, so that it cannot be set from here)",
                name,
                each / 2**20,
            )
