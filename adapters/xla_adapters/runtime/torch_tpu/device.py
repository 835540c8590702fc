"""`TPUDevice`: starts TorchTPU, and answers questions about its device."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from importlib import metadata

import torch
from torch_tpu import _loader
from torch_tpu._internal.device import _device_ops_backend as _backend

from xla_adapters.errors import ConfigError, RuntimeOrderError, UnsupportedOptionError
from xla_adapters.runtime.interface.device import DEFAULT_TUNING, Tuning
from xla_adapters.runtime.patches import keep_parameters_when_moved
from xla_adapters.runtime.torch_tpu.operators import mend_operators, part_copies

TYPE = "tpu"
# Whose private names are known; see `tests/torch_tpu`.
_KNOWN = "0.2"


def unknown_version() -> str | None:
    """The installed version of torch_tpu, if its private names were not checked; None if they were."""
    version = metadata.version("torch_tpu")
    return None if version == _KNOWN or version.startswith(f"{_KNOWN}.") else version


class TPUDevice:
    """`Device` on TorchTPU: one device in each process."""

    def __init__(self) -> None:
        self._device: torch.device | None = None

    def prepare(self) -> None:
        """See `Device`; there is nothing to set."""

    def initialize(self, *, spmd: bool = False, tuning: Tuning = DEFAULT_TUNING) -> None:
        """See `Device`."""
        if spmd:
            raise UnsupportedOptionError(
                "spmd=True (sharding): with torch_tpu each process has one device, and this package shards with "
                "torch_xla only; leave it out, or install torch_xla"
            )
        if tuning.asks_for_something:
            raise ConfigError(
                f"initialize(fast_compile={tuning.fast_compile!r}, keep_memory={tuning.keep_memory!r}): both are for "
                "CPU devices of torch_xla, and torch_tpu has none; leave them out"
            )
        self._check_processes()
        if self._device is not None:
            return
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

    def _check_processes(self) -> None:
        """Raises if several processes were launched, of which each would train by itself, on the same samples."""
        # torchrun tells its processes by the variable, whether or not they have joined a group.
        variable = os.environ.get("WORLD_SIZE", "")
        launched = max(self.world_size(), int(variable) if variable.isdigit() else 1)
        if launched > 1:
            raise UnsupportedOptionError(
                f"{launched} processes were launched (WORLD_SIZE={variable or 'is not set'}): with TorchTPU this "
                "package trains on one device in one process, and several would train on the same samples without any "
                "exchange. Start the script without torchrun or accelerate launch; torch_xla trains on several devices"
            )

    def use_compile_cache(self, folder: str) -> None:
        """See `Device`."""
        warnings.warn(
            f"cache_dir={folder!r} is not used: torch_tpu keeps no executables in a folder", UserWarning, stacklevel=2
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

    def preemption_sync_point(self) -> Callable[[int], bool] | None:
        """See `Device`."""
        return None

    def owns(self, tensor: torch.Tensor) -> bool:
        """See `Device`."""
        return tensor.device.type == TYPE

    def wait(self) -> None:
        """See `Device`."""
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
