"""The compile cache: programs that a process has compiled are kept in a folder, and loaded by later processes.

`plugin.c` is a PJRT plugin that wraps the device's own, which does the work; a runtime loads it in place of that. This
file decides whether programs are kept, and where.
"""

from __future__ import annotations

import logging
import os
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from xla_adapters.config import CacheDir
from xla_adapters.errors import RuntimeOrderError
from xla_adapters.runtime.compile_cache.folder import (
    TORCH_TPU,
    Entry,
    FolderProblem,
    RemoteFolder,
    default_folder,
    distrust,
    entries,
    folder_of,
    note_checksums,
    open_folder,
    prune,
    remove_damaged,
)
from xla_adapters.runtime.compile_cache.library import (
    COMPILE_CACHE,
    LIBRARY,
    WRAPPED,
    CacheCounts,
    CompilesAndLoads,
    described,
    why_missing,
)

__all__ = [
    "COMPILE_CACHE",
    "LIBRARY",
    "SWITCHES",
    "TORCH_TPU",
    "Cache",
    "CacheCounts",
    "CompilesAndLoads",
    "Entry",
    "FolderProblem",
    "default_folder",
    "described",
    "distrust",
    "entries",
    "folder_of",
    "note_checksums",
    "open_folder",
    "prune",
    "remove_damaged",
    "too_late",
    "use_compile_cache",
    "why_missing",
    "wrap_libtpu",
]

VARIABLE = "XLA_ADAPTERS_CACHE_DIR"
# Where torch_xla and TorchTPU look for the TPU's plugin; torch_xla puts what it has found into the second.
_LIBTPU, _FOUND_LIBTPU = "TPU_LIBRARY_PATH", "PTXLA_TPU_LIBRARY_PATH"
_OFF, _ON = ("0", "off", "false"), ("1", "on", "true")
# What the variable may be beside a folder.
SWITCHES = (*_OFF, *_ON)
_log = logging.getLogger("xla_adapters")
# Whether the program has passed `cache_dir=`.
_is_chosen = False
# What was said, once each.
_said: set[str] = set()


class Cache(Protocol):
    """What keeps the programs of this process.

    Attributes:
        folder: where they are kept; None for nowhere.
    """

    folder: Path | None

    @property
    def is_ready(self) -> bool:
        """Whether the runtime will start with it, or has."""

    def holds(self, folder: Path) -> bool:
        """Whether this is the folder where they are kept, and it is still there."""

    def use(self, folder: Path | None) -> bool:
        """Says where programs are kept from now on; the folder is made if it is not there.

        Returns:
            Whether programs are written there. If not, what is there is loaded.

        Raises:
            FolderProblem: the folder cannot be used; nothing is kept.
        """


def use_compile_cache(
    cache_dir: CacheDir, cache: Cache, *, by_default: bool, has_started: bool, prepare: Callable[[], str | None]
) -> None:
    """Keeps compiled programs in a folder from now on, or no longer.

    What stands in the way of a folder that was asked for is a warning, since all works without it; in the way of the
    default folder, a line of the log.

    Args:
        cache_dir: see `CacheDir`.
        cache: what keeps them.
        by_default: whether programs are kept if nothing is said.
        has_started: whether the runtime has.
        prepare: makes the runtime load the cache when it starts; returns why that is impossible, as a clause.

    Raises:
        RuntimeOrderError: a folder is asked for after the runtime has started without a cache.
    """
    global _is_chosen
    if cache_dir is None and _is_chosen:
        # An argument has priority over the environment.
        return
    _is_chosen = _is_chosen or cache_dir is not None
    said = os.environ.get(VARIABLE, "") if cache_dir is None else cache_dir
    if said is False or str(said).lower() in _OFF:
        cache.use(None)
        return
    asked = bool(said)
    if str(said).lower() in _ON:
        said = ""
    try:
        _use(cache_dir, said, cache, by_default=by_default or asked, has_started=has_started, prepare=prepare)
    except FolderProblem as error:
        _say(f"compiled programs are not kept: {error}", asked=asked)


def _use(
    cache_dir: CacheDir,
    said: str | os.PathLike[str],
    cache: Cache,
    *,
    by_default: bool,
    has_started: bool,
    prepare: Callable[[], str | None],
) -> None:
    remote = RemoteFolder(str(said)) if "://" in str(said) else None
    folder = folder_of(said)
    if cache.holds(folder) or (not said and (not by_default or cache.folder is not None)):
        return
    if not cache.is_ready:
        if has_started:
            if cache_dir is not None:
                raise too_late(folder)
            raise FolderProblem(f"{folder} is not used, since the runtime had started before")
        try:
            problem = prepare()
        except OSError as error:
            problem = str(error)
        if problem is not None:
            raise FolderProblem(problem)
    if remote is not None:
        remote.fetch()
        # Before the pools of threads end, which clients of object stores use.
        threading._register_atexit(_publish, remote)  # type: ignore[attr-defined]
    writes = cache.use(folder)
    _log.info(
        "compiled programs are %s %s, so that a later process need not compile them again. cache_dir=False, or %s=off, "
        "switches that off",
        "kept in" if writes else "loaded from (but not kept in, since it is read-only)",
        folder if remote is None else f"{said} (copied to {folder}, and back when the process ends)",
        VARIABLE,
    )


def _publish(remote: RemoteFolder) -> None:
    try:
        _log.info("%s compiled programs were copied to %s", remote.publish(), remote.url)
    except FolderProblem as error:
        _log.warning("compiled programs were not copied: %s", error)


def too_late(folder: Path) -> RuntimeOrderError:
    """The error of a folder that is asked for after the runtime has started without it."""
    return RuntimeOrderError(
        f"cache_dir={str(folder)!r} was asked for after the runtime had started without it. Call "
        "xla_adapters.initialize(cache_dir=...) at the start of the program, before a tensor or model is moved to the "
        f"device and before transformers.TrainingArguments are created, or start Python with {VARIABLE}={folder}"
    )


def wrap_libtpu() -> str | None:
    """Has the runtime load the caching plugin around libtpu, by `TPU_LIBRARY_PATH`.

    Returns:
        Why it cannot, as a clause; None if it will.
    """
    found = os.environ.get(_LIBTPU) or os.environ.get(_FOUND_LIBTPU, "")
    if Path(found).name == LIBRARY.name:
        # Set by the process that started this one.
        found = os.environ.get(WRAPPED, "")
    if not Path(found).is_file():
        return f"libtpu, the TPU's plugin, was not found (TPU_LIBRARY_PATH is {found!r})"
    os.environ[_LIBTPU] = str(COMPILE_CACHE.wrap(Path(found), compiles_for_host=False))
    return None


def _say(problem: str, *, asked: bool) -> None:
    if problem in _said:
        return
    _said.add(problem)
    if asked:
        warnings.warn(
            f"{problem}. Everything works without it, and each process compiles again", UserWarning, stacklevel=5
        )
    else:
        _log.info(problem)
