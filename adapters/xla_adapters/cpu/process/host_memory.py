"""`HostMemory`: whether the process keeps the memory that steps free, on CPU devices.

- glibc allocates pieces of more than 32 MiB with `mmap` and returns them to the kernel when they are freed
  (https://man7.org/linux/man-pages/man3/mallopt.3.html). If a step's temporary memory is larger, the kernel maps and
  clears all of its pages in each step.
- Threads of the runtime allocate from their own heaps of 64 MiB. glibc returns an empty one, unless the padding on top
  is larger than two heaps (glibc 2.36, malloc/arena.c, heap_trim).
- Such a thread maps pieces of more than 64 MiB in any case. So XLA is told to allocate smaller pieces
  (`compiler_flags.divide_temporary_memory`), which it must know before the runtime starts.
- For pieces that are mapped all the same, huge pages (2 MB) make it cheap. glibc asks for them only if `GLIBC_TUNABLES`
  says so when the process starts (glibc.malloc.hugetlb, since glibc 2.35).
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from xla_adapters.errors import ConfigError

_log = logging.getLogger("xla_adapters")

# Parameters of mallopt (malloc.h).
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -2, -3, -4
# The padding is address space; it costs memory only once it is written.
_KEEP = {_TRIM_THRESHOLD: -1, _TOP_PAD: 192 << 20, _MMAP_MAX: 0}
# The thresholds that glibc would adapt to by itself in a process with large pieces; it stops adapting once one is set.
_GIVE_BACK = {_TRIM_THRESHOLD: 64 << 20, _TOP_PAD: 128 << 10, _MMAP_THRESHOLD: 32 << 20, _MMAP_MAX: 65536}
# Bytes: half of a thread's heap.
LARGEST_PIECE = 32 << 20
_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_TOP_PAD_")
_TUNABLES = ("trim_threshold", "mmap_threshold", "mmap_max", "top_pad")
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


class HostMemory:
    """Sets whether glibc's allocator keeps freed memory or returns it to the system.

    Args:
        mallopt: glibc's function; None on other C libraries.
        environment: looked at for the user's own allocator settings, which have priority.
        huge_pages: the kernel's file that says who may use huge pages.
    """

    def __init__(
        self,
        mallopt: Callable[[int, int], int] | None,
        environment: Mapping[str, str] = os.environ,
        huge_pages: Path = _HUGE_PAGES,
    ) -> None:
        self._mallopt = mallopt
        self._environment = environment
        self._huge_pages = huge_pages
        self._keeps: bool | None = None

    @classmethod
    def of_process(cls) -> HostMemory:
        """The allocator of this process."""
        is_glibc = "CS_GNU_LIBC_VERSION" in getattr(os, "confstr_names", {})
        return cls(ctypes.CDLL(None).mallopt if is_glibc else None)

    def keep_freed(self, keep: bool | None) -> None:
        """Sets whether the process keeps what it frees.

        Args:
            keep: None keeps it if possible, unless this was called before or the environment sets the allocator.

        Raises:
            ConfigError: `keep` is True, and the process does not use glibc.
        """
        if keep is None and (self._mallopt is None or self._keeps is not None or self._is_told()):
            return
        if self._mallopt is None and keep:
            raise ConfigError(
                "initialize(keep_memory=True) speaks to glibc's allocator, and this process has another; leave it out"
            )
        kept, self._keeps = self._keeps, keep is not False
        if self._mallopt is not None and self._keeps is not bool(kept):
            for parameter, value in (_KEEP if self._keeps else _GIVE_BACK).items():
                self._mallopt(parameter, value)
        if self._keeps and not kept:
            _log.info(
                "memory that is freed stays with the process, so that no step has it mapped anew (mallopt: "
                "M_MMAP_MAX=0, M_TRIM_THRESHOLD=-1, M_TOP_PAD=192 MiB); xla_adapters.initialize(keep_memory=False) "
                "gives it back"
            )

    def keeps(self) -> bool:
        """Whether the process keeps what it frees, or will do so when a training starts."""
        if self._keeps is None:
            return self._mallopt is not None and not self._is_told()
        return self._keeps

    def could_have_huge_pages(self) -> bool:
        """Whether huge pages would be available if `GLIBC_TUNABLES` asked for them (False if it does)."""
        return bool(
            self._keeps
            and "glibc.malloc.hugetlb=" not in self._environment.get("GLIBC_TUNABLES", "")
            and self._huge_pages.exists()
            and "[madvise]" in self._huge_pages.read_text(encoding="ascii")
            and _glibc_version() >= (2, 35)
        )

    def _is_told(self) -> bool:
        tunables = self._environment.get("GLIBC_TUNABLES", "")
        return any(name in self._environment for name in _VARIABLES) or any(
            f"glibc.malloc.{name}=" in tunables for name in _TUNABLES
        )


def _glibc_version() -> tuple[int, ...]:
    told = os.confstr("CS_GNU_LIBC_VERSION") or "glibc 0"
    return tuple(int(part) for part in told.split()[-1].split("."))
