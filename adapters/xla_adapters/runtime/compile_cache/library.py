"""`plugin.c` in this process: the plugin that it wraps, the folder in which it keeps programs, and its counts."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from xla_adapters.runtime.compile_cache.folder import open_folder

# Not with a suffix of Python's extension modules, among which it would be found.
LIBRARY = Path(__file__).with_name("plugin.so.1")
# The variable that tells processes started by this one which plugin is wrapped.
WRAPPED = "XLA_ADAPTERS_WRAPPED_PLUGIN"
_log = logging.getLogger("xla_adapters")
# As `cache_interface` in plugin.c.
_INTERFACE = 2
_LOGGED = 4096
# How a note with the identity of a build begins, which linkers write.
_BUILD_ID = b"\x04\0\0\0\x14\0\0\0\x03\0\0\0GNU\0"
_SIZE_OF_HEAD = 1 << 16


@dataclass(frozen=True, kw_only=True)
class CacheCounts:
    """What the compile cache of this process did.

    Attributes:
        loaded: programs that were loaded instead of compiled.
        compiled: programs that were compiled.
        written: of these, those that were kept.
        rejected: entries that could not be used: damaged, cut off, refused by the device, or writable by others.
        problem: what went wrong last; empty if nothing did.
    """

    loaded: int = 0
    compiled: int = 0
    written: int = 0
    rejected: int = 0
    problem: str = ""


class CacheLibrary:
    """The caching plugin, as this process loads it.

    Attributes:
        wrapped: the library of the plugin that it wraps; None if it wraps none.
        folder: where programs are kept; None for nowhere.
        plans: where what programs depend on is kept beside them, as plans of sharding: the folder, or that of records.
    """

    def __init__(self) -> None:
        self.wrapped: Path | None = None
        self.folder: Path | None = None
        self.plans: Path | None = None
        self._library: ctypes.CDLL | None = None
        self._opened: tuple[int, int] | None = None
        self._records = False
        self._told: set[str] = set()

    @property
    def is_ready(self) -> bool:
        """See `Cache`."""
        return self.wrapped is not None

    def wrap(self, plugin: Path, *, compiles_for_host: bool, pads_options: bool = False) -> Path:
        """Says which plugin it wraps, before the runtime starts.

        Args:
            plugin: the path of the plugin's library.
            compiles_for_host: whether programs are machine code for the host's processor.
            pads_options: whether the plugin is newer than what calls it and wants longer options of executions.

        Returns:
            The library to load in place of the plugin.

        Raises:
            OSError: the library, or the plugin's, cannot be read or loaded.
        """
        if self._library is None:
            library = ctypes.CDLL(str(LIBRARY))
            try:
                interface = ctypes.c_int.in_dll(library, "cache_interface").value
            except ValueError:
                interface = 0
            if interface != _INTERFACE:
                raise OSError(f"{LIBRARY} is of another version of this package: install it again")
            self._library = library
        if self.wrapped != plugin:
            identity = described(plugin, compiles_for_host=compiles_for_host)
            self._library.cache_wrap(os.fsencode(plugin), identity.encode(), int(pads_options))
            self.wrapped = plugin
            # For processes that this one starts.
            os.environ[WRAPPED] = str(plugin)
        return LIBRARY

    def record(self, plugin: Path, folder: Path, devices: int) -> Path:
        """Has this process record the programs that it compiles, for `libtpu_process`. No folder is used from then on.

        Args:
            plugin: the library of a plugin for the CPU, whose devices stand in for TPUs.
            folder: for the records.
            devices: how many there are.

        Returns, Raises:
            As `wrap`. FolderProblem: the folder cannot be used.
        """
        library = self.wrap(plugin, compiles_for_host=True, pads_options=True)
        self.use(folder)
        assert self._library is not None
        self._library.cache_record(ctypes.c_long(devices))
        self._records, self.folder, self.plans = True, None, folder
        return library

    def flags(self) -> tuple[str, str]:
        """XLA_FLAGS and LIBTPU_INIT_ARGS as they were when the runtime started; empty before."""
        assert self._library is not None
        xla, libtpu = (ctypes.c_char_p * 2).in_dll(self._library, "cache_flags")
        return os.fsdecode(xla or b""), os.fsdecode(libtpu or b"")

    def holds(self, folder: Path) -> bool:
        """See `Cache`."""
        return self._records or (folder == self.folder and identity_of(folder) == self._opened)

    def use(self, folder: Path | None) -> bool:
        """See `Cache`."""
        self.folder = None
        if self._library is None or self._records:
            return False
        self.plans = None
        self._library.cache_use(-1, 0)
        if folder is None:
            return False
        descriptor, writable = open_folder(folder)
        self._library.cache_use(descriptor, int(writable))
        self.folder = self.plans = folder
        self._opened = identity_of(folder)
        return writable

    def last_loaded(self, number: int) -> list[bool]:
        """Of the last programs that were asked for, in order, whether each was loaded; fewer, if it knows fewer."""
        if self._library is None:
            return []
        asked = ctypes.c_long.in_dll(self._library, "cache_asked").value
        log = (ctypes.c_char * _LOGGED).in_dll(self._library, "cache_log").raw
        return [log[place % _LOGGED] == 1 for place in range(max(0, asked - min(number, _LOGGED)), asked)]

    def counts(self) -> CacheCounts:
        """What it did so far; a problem is logged, once."""
        library = self._library
        if library is None:
            return CacheCounts()
        loaded, compiled, written, rejected = (
            ctypes.c_long.in_dll(library, f"cache_{name}").value
            for name in ("loaded", "compiled", "written", "rejected")
        )
        problem = (ctypes.c_char * 512).in_dll(library, "cache_problem").value.decode(errors="replace")
        if problem and problem not in self._told:
            self._told.add(problem)
            _log.warning("compile cache%s: %s", f" in {self.folder}" if self.folder else "", problem)
        return CacheCounts(loaded=loaded, compiled=compiled, written=written, rejected=rejected, problem=problem)


COMPILE_CACHE = CacheLibrary()


class CompilesAndLoads:
    """Tells compiles from loads: a runtime counts both alike, and the cache does not know which are graphs of steps.

    Args:
        in_order: takes how many graphs and how many eager operations were asked for last, and returns for each of
            them, in order of time, whether it was a graph. Without it, loads that cannot be told apart count as those
            of eager operations.
    """

    def __init__(self, in_order: Callable[[int, int], list[bool]] | None = None) -> None:
        self._in_order = in_order
        self._before = (0, 0, 0)
        self._compiles = 0

    def __call__(self, graphs: int, eager: int, loads: int) -> tuple[int, int, int]:
        """How many graphs and eager operations were compiled so far, and how many programs were loaded.

        Args:
            graphs, eager: how many were compiled or loaded so far.
            loads: how many programs were loaded.
        """
        now = (graphs, eager, loads)
        new_graphs, new_eager, new_loads = (total - before for total, before in zip(now, self._before, strict=True))
        self._before = now
        loaded = min(new_graphs, max(0, new_loads - new_eager))
        if new_loads and new_graphs and new_eager and self._in_order is not None:
            kinds, log = self._in_order(new_graphs, new_eager), COMPILE_CACHE.last_loaded(new_graphs + new_eager)
            if len(kinds) == len(log):
                loaded = sum(is_graph and was_loaded for is_graph, was_loaded in zip(kinds, log, strict=True))
        self._compiles += new_graphs - loaded
        return self._compiles, graphs + eager - loads - self._compiles, loads


def identity_of(folder: Path) -> tuple[int, int] | None:
    """What tells a folder from one that was made in its place; None if there is none."""
    try:
        status = folder.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def why_missing() -> str | None:
    """Why there is no caching plugin, as a clause; None if there is one."""
    if not LIBRARY.exists():
        return "this package was installed without its caching plugin: install a C compiler (cc), and reinstall it"
    return None


def described(plugin: Path, *, compiles_for_host: bool) -> str:
    """What programs of a plugin depend on beside what it says of itself: its build, the host's processor.

    Args:
        plugin, compiles_for_host: as for `CacheLibrary.wrap`.
    """
    return f"{_build_of(plugin)} {_processor() if compiles_for_host else 'any host'}"


def _build_of(plugin: Path) -> str:
    """Tells builds of a plugin apart, wherever they are installed."""
    with plugin.open("rb") as file:
        head = file.read(_SIZE_OF_HEAD)
        if _BUILD_ID in head:
            return f"{plugin.stat().st_size} {hashlib.sha256(head).hexdigest()}"
        file.seek(0)
        return hashlib.file_digest(file, "sha256").hexdigest()


def _processor() -> str:
    """The host's processor, what it can do, and how many of its cores this process may use.

    Programs for it may not run on another one, and are divided among the cores.
    """
    information = Path("/proc/cpuinfo")
    lines = information.read_text().split("\n\n")[0].splitlines() if information.exists() else [platform.processor()]
    told = [
        line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part", "CPU implementer"))
    ]
    cores = str(len(os.sched_getaffinity(0)))
    return hashlib.sha256("\n".join([platform.machine(), cores, *told]).encode()).hexdigest()
