"""`MappedMemory`: warns if the kernel maps a step's memory again in each step, and names the setting that avoids it."""

from __future__ import annotations

import logging
import resource
from collections.abc import Callable
from itertools import pairwise

logger = logging.getLogger("xla_adapters")

# Steps after which page faults are read. The first steps compile, and the host may be 32 steps ahead of the device
# (limit of PJRT's CPU client). A later compile (an evaluation) also maps memory, but not in both intervals.
_MARKS = (40, 100, 160)
# Bytes per step; the allocator keeps less than this (`xla_adapters.cpu.process.host_memory`).
_MUCH = 64 << 20


def _mapped() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt * resource.getpagesize()


class MappedMemory:
    """Counts page faults of a program's first 160 steps, and warns once if huge pages would help.

    Args:
        mapped: returns the bytes that the kernel has mapped for the process so far.
        could_have_huge_pages: whether huge pages are available and not used.
    """

    def __init__(
        self,
        mapped: Callable[[], int] = _mapped,
        *,
        could_have_huge_pages: Callable[[], bool],
    ) -> None:
        self._mapped = mapped
        self._could_have_huge_pages = could_have_huge_pages
        self._steps = 0
        self._totals: list[int] = []

    def step_ended(self, name: str) -> None:
        """Counts a step; may warn after the last one that is observed.

        Args:
            name: of the step, for the warning.
        """
        self._steps += 1
        if self._steps not in _MARKS:
            return
        self._totals.append(self._mapped())
        if len(self._totals) < len(_MARKS):
            return
        steps = zip(pairwise(self._totals), pairwise(_MARKS), strict=True)
        each = min((after - before) / (last - first) for (before, after), (first, last) in steps)
        if each > _MUCH and self._could_have_huge_pages():
            logger.warning(
                "%s: the system maps %d MB of memory anew in each step, page by page, which can take as long as the "
                "computation itself. Start Python with GLIBC_TUNABLES=glibc.malloc.hugetlb=1 in its environment for "
                "pages of 2 MB (glibc reads it once, as the process starts, so it cannot be set from Python)",
                name,
                each / 2**20,
            )
