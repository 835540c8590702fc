"""Options of the process on CPU devices: flags of XLA's compiler, and memory that steps free and need again.

- glibc allocates pieces of more than 32 MiB with `mmap` and returns them to the kernel when they are freed
  (https://man7.org/linux/man-pages/man3/mallopt.3.html). If a step's temporary memory is larger, the kernel maps and
  clears all of its pages in each step.
- Threads of the runtime allocate from their own heaps of 64 MiB. glibc returns an empty one, unless the padding on top
  is larger than two heaps (glibc 2.36, malloc/arena.c, heap_trim).
- Such a thread maps pieces of more than 64 MiB in any case. So XLA is told to allocate smaller pieces
  (`divide_temporary_memory`), which it must know before the runtime starts.
- For pieces that are mapped all the same, huge pages (2 MB) make it cheap. glibc asks for them only if `GLIBC_TUNABLES`
  says so when the process starts (glibc.malloc.hugetlb, since glibc 2.35).
"""

from __future__ import annotations

import ctypes
import logging
import os
import resource
from collections.abc import Callable, Mapping, MutableMapping
from itertools import pairwise
from pathlib import Path

from xla_adapters.errors import ConfigError
from xla_adapters.runtime import Device
from xla_adapters.runtime.compile_cache import COMPILE_CACHE

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
# Steps after which page faults are read. The first steps compile, and the host may be 32 steps ahead of the device
# (limit of PJRT's CPU client). A later compile (an evaluation) also maps memory, but not in both intervals.
_MARKS = (40, 100, 160)
# Bytes per step; the allocator keeps less than this.
_MUCH = 64 << 20

# The variable that the runtime reads once, as it starts.
_FLAGS = "XLA_FLAGS"
_LEFT_OUT = "--xla_disable_hlo_passes="
# Splits each sum into windows whose kernels are compiled one by one. Without it sums are fused, and equal fusions share
# a kernel.
_SLOW = "tree_reduction_rewriter"
# Removes optimization barriers before fusion; here barriers are meant to limit fusion.
_DROPS_BARRIERS = "cse_barrier_expander"
_PIECES = "--xla_multiheap_size_constraint_per_heap="


# ---- memory -----------------------------------------------------------------------------------------


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


class KeptMemory:
    """Combines the two settings that keep freed memory: glibc's (`HostMemory`), and XLA's size of allocations.

    Keeping it saves the kernel from mapping and clearing the pages in each step.
    """

    def __init__(self) -> None:
        self._host_memory = HostMemory.of_process()
        self._divides = False

    def divide(self, device: Device) -> None:
        """Sets the XLA flag for smaller allocations if the runtime has not started; logs it.

        Not with a compile cache: XLA:CPU cannot serialize a program whose temporary values lie in several pieces.
        """
        if COMPILE_CACHE.is_ready:
            # A process that started this one may have set it.
            if not device.started():
                leave_temporary_memory_whole(LARGEST_PIECE)
                self._divides = False
            return
        if not device.started() and device.hardware() == "CPU" and self._host_memory.keeps():
            self._divides = divide_temporary_memory(LARGEST_PIECE) or self._divides
        if self._divides:
            # Logged again on later calls: logging is usually not configured yet as a Trainer is imported.
            _log.info(
                "XLA_FLAGS has --xla_multiheap_size_constraint_per_heap=%d: what a step needs for its temporary values "
                "is taken in pieces that stay with the process. Put a flag of that name there yourself (-1 for one "
                "piece) to have it otherwise",
                LARGEST_PIECE,
            )

    def could_have_huge_pages(self) -> bool:
        """See `HostMemory.could_have_huge_pages`."""
        return self._host_memory.could_have_huge_pages()

    def keep(self, device: Device, keep: bool | None) -> None:
        """See `HostMemory.keep_freed`.

        Raises:
            ConfigError: `keep` is True, and the device is not a CPU, or the process does not use glibc.
        """
        if device.hardware() == "CPU":
            self._host_memory.keep_freed(keep)
            if self._host_memory.keeps():
                self.divide(device)
            elif self._divides and not device.started():
                leave_temporary_memory_whole(LARGEST_PIECE)
                self._divides = False
        elif keep:
            raise ConfigError(
                f"initialize(keep_memory=True) is for CPU devices, and this one is {device.hardware()}, which has a "
                "memory of its own; leave it out here"
            )


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
            _log.warning(
                "%s: the system maps %d MB of memory anew in each step, page by page, which can take as long as the "
                "computation itself. Start Python with GLIBC_TUNABLES=glibc.malloc.hugetlb=1 in its environment for "
                "pages of 2 MB (glibc reads it once, as the process starts, so it cannot be set from Python)",
                name,
                each / 2**20,
            )


# ---- flags of XLA's compiler ------------------------------------------------------------------------


def leaves_out_slow_passes(environment: MutableMapping[str, str] = os.environ) -> bool:
    """Whether `leave_out_slow_passes` is in effect for a runtime that starts now."""
    return _SLOW in _asked(environment)


def leave_out_slow_passes(environment: MutableMapping[str, str] = os.environ) -> None:
    """Disables the compiler passes that cost the most compile time; the runtime must not have started."""
    _leave_out(_SLOW, environment)


def keeps_barriers(environment: MutableMapping[str, str] = os.environ) -> bool:
    """Whether a runtime that starts now will fuse nothing across the barriers in a graph."""
    return _DROPS_BARRIERS in _asked(environment)


def keep_barriers(environment: MutableMapping[str, str] = os.environ) -> bool:
    """Stops the compiler from fusing across optimization barriers; the runtime must not have started.

    Returns:
        Whether the flag was set by this call; False if `XLA_FLAGS` already disables passes.
    """
    if _LEFT_OUT in environment.get(_FLAGS, ""):
        return False
    _leave_out(_DROPS_BARRIERS, environment)
    return True


def keep_no_barriers(environment: MutableMapping[str, str] = os.environ) -> None:
    """Undoes `keep_barriers`; the runtime must not have started."""
    flags = environment.get(_FLAGS, "").split(" ")
    environment[_FLAGS] = " ".join(flag for flag in flags if flag != f"{_LEFT_OUT}{_DROPS_BARRIERS}").strip()


def divide_temporary_memory(most: int, environment: MutableMapping[str, str] = os.environ) -> bool:
    """Has XLA allocate a step's temporary memory in several pieces; the runtime must not have started.

    Args:
        most: the largest piece in bytes; a single value may be larger.
        environment: the environment to change.

    Returns:
        Whether the flag was set by this call; False if it was there already.
    """
    flags = environment.get(_FLAGS, "")
    if _PIECES in flags:
        return False
    environment[_FLAGS] = f"{flags} {_PIECES}{most}".strip()
    return True


def leave_temporary_memory_whole(most: int, environment: MutableMapping[str, str] = os.environ) -> None:
    """Undoes `divide_temporary_memory`; the runtime must not have started."""
    flags = environment.get(_FLAGS, "")
    environment[_FLAGS] = flags.replace(f"{_PIECES}{most}", "").strip()


def _leave_out(name: str, environment: MutableMapping[str, str]) -> None:
    passes = _asked(environment)
    if name not in passes:
        # XLA uses the last occurrence of a flag.
        flag = _LEFT_OUT + ",".join([*passes, name])
        environment[_FLAGS] = f"{environment.get(_FLAGS, '')} {flag}".strip()


def _asked(environment: MutableMapping[str, str]) -> list[str]:
    flags = [flag for flag in environment.get(_FLAGS, "").split() if flag.startswith(_LEFT_OUT)]
    return [name for name in flags[-1].removeprefix(_LEFT_OUT).split(",") if name] if flags else []
