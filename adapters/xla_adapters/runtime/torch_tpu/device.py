"""`TPUDevice`: starts TorchTPU, and answers questions about its device."""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import secrets
import warnings
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import torch
from torch_tpu import _loader
from torch_tpu._internal.device import _device_ops_backend as _backend
from torch_tpu._internal.distributed.distributed import set_tpu_launch_env
from torch_tpu._internal.utils import hardware

from xla_adapters.config import CacheDir
from xla_adapters.errors import ConfigError, RuntimeOrderError, UnsupportedOptionError
from xla_adapters.runtime.compile_cache import (
    TORCH_TPU,
    CacheCounts,
    FolderProblem,
    note_checksums,
    open_folder,
    remove_damaged,
    too_late,
    use_compile_cache,
)
from xla_adapters.runtime.interface.device import DEFAULT_TUNING, Tuning
from xla_adapters.runtime.patches import keep_parameters_when_moved
from xla_adapters.runtime.ranks import Ranks, exchange_on_host
from xla_adapters.runtime.torch_tpu.operators import mend_operators, mend_scans, part_copies

TYPE = "tpu"
# Whose private names are known; see `tests/torch_tpu`.
_KNOWN = "0.2"


def unknown_version() -> str | None:
    """The installed version of torch_tpu, if its private names were not checked; None if they were."""
    version = metadata.version("torch_tpu")
    return None if version == _KNOWN or version.startswith(f"{_KNOWN}.") else version


# TorchTPU keeps programs in two places: in memory, in a folder of this one, and on disk in the folder that it is given.
_IN_MEMORY = Path("/dev/shm/torch_tpu_cache")
_ON_DISK = "TORCH_TPU_TIER3_COMPILATION_CACHE_ROOT"
_NAME_IN_MEMORY = "TORCH_TPU_TIER2_COMPILATION_CACHE"
# Otherwise a program is compiled while it is looked for.
_COMPILES_MEANWHILE = "TORCH_TPU_INTERNAL_TIER3_COMPILATION_CACHE_LOCAL_BACKUP_TASK"


class Tiers:
    """TorchTPU's own compile cache: it reads its variables once, when it compiles first.

    It checks nothing that it loads. So programs get checksums, and those that do not have them are removed before the
    runtime starts; and its folder in memory has a name that other users cannot foresee.
    """

    def __init__(self) -> None:
        self.folder: Path | None = None
        self._rejected = 0

    @property
    def is_ready(self) -> bool:
        """See `Cache`."""
        return self.folder is not None

    def holds(self, folder: Path) -> bool:
        """See `Cache`."""
        return folder == self.folder

    def use(self, folder: Path | None) -> bool:
        """See `Cache`.

        Raises:
            RuntimeOrderError: it is too late for another folder.
        """
        if _backend._is_initialized():
            if folder is not None:
                raise too_late(folder)
            return False
        self.folder = None
        if _are_ours():
            for name in (_ON_DISK, _NAME_IN_MEMORY, _COMPILES_MEANWHILE):
                os.environ.pop(name, None)
        if folder is None:
            return False
        descriptor, writable = open_folder(folder)
        os.close(descriptor)
        if not writable:
            raise FolderProblem(f"TorchTPU needs a folder that it can write to, and {folder} is read-only")
        programs = folder / TORCH_TPU
        try:
            programs.mkdir(mode=0o700, exist_ok=True)
            self._rejected = remove_damaged(folder)
            os.environ[_NAME_IN_MEMORY] = _secret(programs / "name")
        except OSError as error:
            raise FolderProblem(f"{programs} cannot be used: {error.strerror}") from error
        os.environ[_ON_DISK] = str(programs)
        os.environ[_COMPILES_MEANWHILE] = "0"
        self.folder = folder
        atexit.register(self.note_written)
        return True

    def note_written(self) -> None:
        """Writes the checksums of programs that were compiled since; another process may meanwhile remove them."""
        if self.folder is not None:
            with contextlib.suppress(OSError):
                note_checksums(self.folder)

    def counts(self) -> CacheCounts:
        """What it did so far."""
        if self.folder is None or not _backend._is_initialized():
            return CacheCounts(rejected=self._rejected)
        compiled = int(_backend._get_cache_stats().num_compilations)
        loaded = int(_backend._get_cache_misses()) - compiled
        return CacheCounts(loaded=loaded, compiled=compiled, written=compiled, rejected=self._rejected)


TIERS = Tiers()


def _are_ours() -> bool:
    """Whether the variables are none that the user has set: this process has, or the one that started it."""
    return os.environ.get(_COMPILES_MEANWHILE) == "0" and Path(os.environ.get(_ON_DISK, "")).name == TORCH_TPU


def _other_users(folder: Path) -> str | None:
    """Why TorchTPU cannot use its folder in memory, as a clause; its process would end."""
    if _ON_DISK in os.environ and not _are_ours():
        return f"{_ON_DISK} is set, and TorchTPU keeps programs in that folder"
    if folder.exists() and folder.stat().st_uid != os.geteuid():
        return f"TorchTPU keeps programs in {folder}, too, which belongs to another user"
    return None


def _secret(path: Path) -> str:
    """A name that is drawn once for a folder, and kept in it."""
    if not path.exists() or not re.fullmatch("[0-9a-f]{32}", path.read_text(errors="replace")):
        draft = path.with_name(f".{path.name}.{os.getpid()}")
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(secrets.token_hex(16))
        draft.replace(path)
    return path.read_text()


class TPUDevice:
    """`Device` on TorchTPU: one device in each process."""

    def __init__(self) -> None:
        self._device: torch.device | None = None
        self._ranks: Ranks | None = None

    def prepare(self) -> None:
        """See `Device`."""
        self.use_compile_cache(None)

    def initialize(self, *, spmd: bool = False, tuning: Tuning = DEFAULT_TUNING) -> None:
        """See `Device`."""
        if tuning.asks_for_something:
            raise ConfigError(
                f"initialize(fast_compile={tuning.fast_compile!r}, keep_memory={tuning.keep_memory!r}): both are for "
                "CPU devices of torch_xla, and torch_tpu has none; leave them out"
            )
        if not spmd and self._ranks is None:
            self._check_processes()
        if self._device is not None:
            self._join(spmd)
            return
        self.prepare()
        _loader.load()
        was_used = self.started()
        if torch._C._get_privateuse1_backend_name() != TYPE:
            raise RuntimeOrderError("torch_tpu found no TPU, so that torch has no device 'tpu'")
        other = unknown_version()
        if other is not None:
            warnings.warn(
                f"torch_tpu {other} is installed, and only {_KNOWN} is known: steps are executed operation by "
                f"operation. For steps of one executable install torch_tpu=={_KNOWN}.*",
                UserWarning,
                stacklevel=2,
            )
        keep_parameters_when_moved(TYPE)
        if other is None:
            mend_operators()
            if was_used:
                part_copies()
        self._device = torch.device(TYPE, 0)
        self._join(spmd)

    def _join(self, spmd: bool) -> None:
        """Joins the other processes that were launched, if several devices are to be used."""
        if spmd and self._ranks is None and self.launched() > 1:
            if not torch.distributed.is_initialized():
                torch.distributed.init_process_group(f"cpu:gloo,{TYPE}:tpu_dist")
            exchange_on_host(TYPE)
            self._ranks = Ranks()
            if unknown_version() is None:
                mend_scans()

    def launched(self) -> int:
        """See `Device`."""
        # torchrun tells its processes by the variable, whether or not they have joined a group.
        variable = os.environ.get("WORLD_SIZE", "")
        return max(self.world_size(), int(variable) if variable.isdigit() else 1)

    def prepare_launch(self, processes: int | None) -> int:
        """See `Device`; the variables are `TORCH_TPU_SLICEBUILDER_ADDRESSES`, `TORCH_TPU_TOPOLOGY` and the like."""
        count = hardware.get_tpu_device_count() if processes is None else processes
        try:
            set_tpu_launch_env(nproc_per_node=count)
        except ValueError as error:
            raise ConfigError(f"launch: TorchTPU finds no chips for {count} processes: {error}") from error
        return count

    def _check_processes(self) -> None:
        """Raises if several processes were launched, of which each would train by itself, on the same samples."""
        launched = self.launched()
        if launched > 1:
            variable = os.environ.get("WORLD_SIZE")
            said = "WORLD_SIZE is not set" if variable is None else f"WORLD_SIZE={variable}"
            raise UnsupportedOptionError(
                f"{launched} processes were launched ({said}), and this one would train for itself, on "
                "the same samples as the others. Call xla_adapters.initialize(spmd=True) first, and "
                "distribute_module(model, partition_fn='dp') for a loop of your own; or start the script without "
                "torchrun or accelerate launch"
            )

    def use_compile_cache(self, cache_dir: CacheDir) -> None:
        """See `Device`; sets the variables of TorchTPU's own cache (`TORCH_TPU_TIER...`)."""
        use_compile_cache(
            cache_dir, TIERS, by_default=True, has_started=self.started(), prepare=lambda: _other_users(_IN_MEMORY)
        )

    def started(self) -> bool:
        """See `Device`."""
        return bool(_backend._is_initialized())

    def torch_device(self) -> torch.device:
        """See `Device`."""
        if self._device is None:
            self.initialize()
        assert self._device is not None
        return self._device

    def hardware(self) -> str:
        """See `Device`."""
        return "TPU"

    def kind(self) -> str:
        """See `Device`."""
        return str(torch.tpu.get_device_name(0))  # type: ignore[attr-defined]

    def count(self) -> int:
        """See `Device`."""
        return self.world_size()

    def count_here(self) -> int:
        """See `Device`."""
        return 1

    def is_spmd(self) -> bool:
        """See `Device`."""
        return False

    def memory_info(self) -> dict[str, float]:
        """See `Device`; nothing is asked of torch_tpu, which raises where it does not know its chip."""
        return {}

    def world_size(self) -> int:
        """See `Device`."""
        distributed = torch.distributed
        return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1

    def process_index(self) -> int:
        """See `Device`."""
        distributed = torch.distributed
        return distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0

    @property
    def ranks(self) -> Ranks | None:
        """See `Device`."""
        return self._ranks

    def preemption_sync_point(self) -> Callable[[int], bool] | None:
        """See `Device`."""
        return None

    def owns(self, tensor: torch.Tensor) -> bool:
        """See `Device`."""
        return tensor.device.type == TYPE

    def wait(self) -> None:
        """See `Device`."""
        if self.started():
            _backend._synchronize_device(self.torch_device().index, True)

    def start_profile(self, folder: str) -> bool:
        """See `Device`."""
        raise UnsupportedOptionError(
            "profile_steps: this package records profiles with torch_xla only; use torch.profiler itself"
        )

    def mark_profile(self, name: str) -> Callable[[], None]:
        """See `Device`; nothing is recorded."""
        return lambda: None

    def stop_profile(self) -> None:
        """See `Device`; there is none to stop."""

    def is_out_of_memory(self, error: BaseException) -> bool:
        """See `Device`."""
        # torch_tpu writes the first letter of an error within another one small.
        return isinstance(error, RuntimeError) and "RESOURCE_EXHAUSTED" in str(error).upper()
