"""What becomes of memory that a step has freed, on devices whose memory is the host's.

glibc takes pieces of more than 32 MiB from the kernel by `mmap` and gives each back when it is freed
(https://man7.org/linux/man-pages/man3/mallopt.3.html), so that an executable whose temporary values are larger has
every page of them mapped and cleared anew in each step. What a thread of the runtime's has beside the process's heap
comes in heaps of 64 MiB, and an empty one goes back too, unless the padding on top is larger than two of them (glibc
2.36, malloc/arena.c, heap_trim). Pieces of more than 64 MiB that such a thread takes are mapped in any case, unless all
threads share one heap (`MALLOC_ARENA_MAX=1`), and wait for it. So XLA is asked to take smaller ones, which it has to
know when the runtime starts. For those that are mapped all the same pages of 2 MB make it cheap; glibc asks for them
if `GLIBC_TUNABLES` says so when the process starts (glibc.malloc.hugetlb, since 2.35).
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
# The padding is room, not memory, as long as nobody writes there.
_KEEP = {_TRIM_THRESHOLD: -1, _TOP_PAD: 192 << 20, _MMAP_MAX: 0}
# What glibc comes to by itself in a process that has large pieces; once told a threshold, it moves none any more.
_GIVE_BACK = {_TRIM_THRESHOLD: 64 << 20, _TOP_PAD: 128 << 10, _MMAP_THRESHOLD: 32 << 20, _MMAP_MAX: 65536}
# Half of a thread's heap; an executable's temporary values are one piece otherwise.
LARGEST_PIECE = 32 << 20
_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_TOP_PAD_")
_TUNABLES = ("trim_threshold", "mmap_threshold", "mmap_max", "top_pad")
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


class HostMemory:
    """The process's allocator.

    Args:
        mallopt: of glibc; None where there is none.
        environment: where the user may have told the allocator otherwise.
        huge_pages: the kernel's file of who may have pages of 2 MB.
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
        """That of this process."""
        is_glibc = "CS_GNU_LIBC_VERSION" in getattr(os, "confstr_names", {})
        return cls(ctypes.CDLL(None).mallopt if is_glibc else None)

    def keep_freed(self, keep: bool | None) -> None:
        """Has the process keep what it frees, or give it back to the system.

        Args:
            keep: None keeps it if it can, unless something else was said before, here or in the environment.

        Raises:
            ConfigError: it is to be kept, and there is no glibc.
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
        """Whether the process keeps what it frees, or will as soon as a training begins."""
        if self._keeps is None:
            return self._mallopt is not None and not self._is_told()
        return self._keeps

    def could_have_huge_pages(self) -> bool:
        """Whether a process that keeps its memory would have pages of 2 MB, had glibc been told to ask for them."""
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
