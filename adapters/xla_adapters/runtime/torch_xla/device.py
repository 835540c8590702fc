"""`XLADevice`: starts torch_xla, and answers questions about its devices and processes."""

from __future__ import annotations

import functools
import logging
import os
import warnings
from collections.abc import Callable, MutableMapping

import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.debug.profiler as profiler
import torch_xla.runtime as xr

from xla_adapters.errors import ConfigError, RuntimeOrderError, UnsupportedOptionError
from xla_adapters.runtime.extensions import initialize_extensions
from xla_adapters.runtime.interface.device import DEFAULT_TUNING, Tuning
from xla_adapters.runtime.patches import keep_parameters_when_moved, run_backward_where_it_is_called
from xla_adapters.runtime.torch_xla.counters import COMPILE_MEMORY
from xla_adapters.runtime.torch_xla.operators import complete_autocast, register_kernels
from xla_adapters.runtime.torch_xla.patches import (
    count_tpus_without_asking,
    linearize_without_trace,
    run_scans_in_eager_mode,
)
from xla_adapters.runtime.torch_xla.random_numbers import seed_with_torch

_log = logging.getLogger("xla_adapters")
_C = torch_xla._XLAC
# Devices on which torch_xla 2.9 loads none of the executables that it has written, and why.
_CANNOT_LOAD = {"CPU": "PJRT has not implemented it there", "TPU": "pytorch/xla#9094"}
# Devices whose maxima and minima leave NaN out, unless this flag is set.
_LOSE_NAN = frozenset({"CPU"})
_FLAG = "--xla_cpu_enable_fast_min_max"
_AUTO = (
    "xr.use_spmd(auto=True) (or XLA_AUTO_SPMD=1): torch_xla 2.9's own automatic sharding splits nothing but on TPUs, "
    "and costs one more compile. Leave it out, and say what is to be sharded: Trainer(..., auto_sharding=True), "
    "XLAEagerStrategy(auto_sharding=True), or in a loop of your own xla_adapters.initialize(spmd=True) and "
    'xla_adapters.distribute_module(model, partition_fn="AUTO", example=batch)'
)


class XLADevice:
    """`Device` on torch_xla: any PJRT device, or the virtual device under SPMD."""

    def __init__(self) -> None:
        self._initialized = self._has_sync_points = False
        self._has_warned = False
        self._device: torch.device | None = None

    def prepare(self) -> None:
        """See `Device`; sets `XLA_FLAGS`, which is logged."""
        keep_nan(self.hardware(), started=self.started())

    def initialize(self, *, spmd: bool = False, tuning: Tuning = DEFAULT_TUNING) -> None:
        """See `Device`; switches SPMD on first if asked for."""
        if not self._initialized:
            self.prepare()
        if tuning.asks_for_something or not self._initialized:
            initialize_extensions(self, spmd=spmd, tuning=tuning)
        if self._initialized and (not spmd or xr.is_spmd()):
            return
        if os.environ.get("XLA_DISABLE_FUNCTIONALIZATION", "0").lower() in ("1", "true"):
            raise ConfigError(
                "XLA_DISABLE_FUNCTIONALIZATION is set: without functionalization a failed step cannot be undone. "
                "Unset it before torch_xla is imported."
            )
        if os.environ.get("XLA_AUTO_SPMD", "0").lower() in ("1", "true"):
            raise UnsupportedOptionError(_AUTO)
        if spmd and not xr.is_spmd():
            if _C._xla_get_spmd_config_is_locked():
                raise RuntimeOrderError(
                    "SPMD was asked for after the XLA runtime had started without it, and it cannot be switched on any "
                    "more (torch_xla 2.9 crashes at the first execution). Call xla_adapters.initialize(spmd=True) at "
                    "the start of the program, before a tensor or model is moved to the XLA device and before "
                    "transformers.TrainingArguments are created, which start the runtime; or set XLA_USE_SPMD=1."
                )
            xr.use_spmd()
        COMPILE_MEMORY.start()
        had_started = self.started()
        # Under SPMD the device alone does not start the runtime; counting devices does.
        xr.global_runtime_device_count()
        self._device = torch_xla.device()
        complete_autocast()
        register_kernels()
        keep_parameters_when_moved("xla")
        run_backward_where_it_is_called()
        linearize_without_trace()
        run_scans_in_eager_mode()
        count_tpus_without_asking()
        seed_with_torch(had_started=had_started)
        self._initialized = True

    def use_compile_cache(self, folder: str) -> None:
        """See `Device`."""
        hardware = self.hardware()
        if hardware in _CANNOT_LOAD:
            if not self._has_warned:
                self._has_warned = True
                warnings.warn(
                    f"cache_dir={folder!r} has no effect: torch_xla 2.9 cannot load executables on {hardware} devices "
                    f"({_CANNOT_LOAD[hardware]}), so every process compiles again, and nothing is written",
                    UserWarning,
                    stacklevel=3,
                )
        elif os.environ.get("XLA_PERSISTENT_CACHE_PATH") != folder:
            if self.started():
                raise RuntimeOrderError(
                    f"cache_dir={folder!r} was asked for after the XLA runtime had started without it. Call "
                    "xla_adapters.initialize(cache_dir=...) at the start of the program, before a tensor or model is "
                    "moved to the XLA device and before transformers.TrainingArguments are created"
                )
            xr.initialize_cache(folder)

    def started(self) -> bool:
        """See `Device`."""
        return bool(_C._xla_get_spmd_config_is_locked())

    def torch_device(self) -> torch.device:
        """See `Device`."""
        self.initialize()
        assert self._device is not None
        return self._device

    def hardware(self) -> str:
        """See `Device`."""
        return str(xr.device_type())

    def kind(self) -> str:
        """See `Device`; torch_xla knows no kind of the virtual device that stands for all under SPMD."""
        return "" if self.is_spmd() else str(_C._xla_device_kind(str(self.torch_device())))

    def count(self) -> int:
        """See `Device`."""
        return int(xr.global_runtime_device_count())

    def count_here(self) -> int:
        """See `Device`."""
        return int(xr.addressable_runtime_device_count())

    def is_spmd(self) -> bool:
        """See `Device`."""
        return bool(xr.is_spmd())

    def memory_info(self) -> dict[str, float]:
        """See `Device`; XLA:CPU does not tell, nor does the virtual device that stands for all under SPMD."""
        if self.is_spmd():
            return {}
        try:
            info = xm.get_memory_info(str(self.torch_device()))
        except RuntimeError as error:
            if "UNIMPLEMENTED" not in str(error):
                raise
            return {}
        return {name: float(value) for name, value in info.items()}

    def world_size(self) -> int:
        """See `Device`."""
        return int(xr.world_size())

    def process_index(self) -> int:
        """See `Device`."""
        return int(xr.global_ordinal())

    def preemption_sync_point(self) -> Callable[[int], bool] | None:
        """See `Device`; only processes on TPUs have one."""
        return self._sync_point_reached if self.hardware() == "TPU" and xr.process_count() > 1 else None

    def _sync_point_reached(self, step: int) -> bool:
        if not self._has_sync_points:
            # As torch_xla's CheckpointManager does.
            _C._ensure_xla_coordinator_initialized(xr.process_index(), xr.process_count(), xr.get_master_ip())
            _C._activate_preemption_sync_manager()
            self._has_sync_points = True
        return bool(_C._sync_point_reached(step))

    def owns(self, tensor: torch.Tensor) -> bool:
        """See `Device`."""
        return tensor.device.type == "xla"

    def wait(self) -> None:
        """See `Device`."""
        xm.wait_device_ops()

    def start_profile(self, folder: str) -> bool:
        """See `Device`."""
        try:
            profiler.start_trace(folder)
        except RuntimeError as error:
            if "already been started" not in str(error):
                raise
            return False
        return True

    def mark_profile(self, name: str) -> Callable[[], None]:
        """See `Device`."""
        # Not `profiler.Trace`, which may not be open at the edge of a step, and names operations of graphs, too.
        span = _C.profiler.TraceMe(name)
        span.__enter__()
        return functools.partial(span.__exit__, None, None, None)

    def stop_profile(self) -> None:
        """See `Device`."""
        profiler.stop_trace()

    def is_out_of_memory(self, error: BaseException) -> bool:
        """See `Device`."""
        return isinstance(error, RuntimeError) and "RESOURCE_EXHAUSTED" in str(error)


# ---- flags of XLA's compiler ----------------------------------------------------------------------


def keep_nan(hardware: str, *, started: bool, environment: MutableMapping[str, str] = os.environ) -> None:
    """Has the largest and smallest of values be NaN if one of them is, as in torch; for CPU devices.

    XLA:CPU takes such a value for none otherwise: in `amax`, `max`, max pooling and `scatter_reduce`. Logged at INFO on
    each call, since logging is usually not configured yet as a Trainer is imported. A flag that the user has set stays
    as it is.

    Args:
        hardware: of the process; other devices need no flag.
        started: whether the runtime runs already, so that the flag comes too late; warns.
        environment: the environment to change.
    """
    if hardware not in _LOSE_NAN:
        return
    flags = environment.get("XLA_FLAGS", "")
    if started and _FLAG not in flags:
        warnings.warn(
            "the XLA runtime had started before xla_adapters was initialized: on CPU devices the maxima and minima of "
            "values with NaN (amax, max, max pooling, scatter_reduce) leave the NaN out. Call "
            "xla_adapters.initialize() before torch_xla.device() and before a tensor is moved to the device, or start "
            f"Python with XLA_FLAGS={_FLAG}=false",
            UserWarning,
            stacklevel=2,
        )
        return
    if _FLAG not in flags:
        environment["XLA_FLAGS"] = f"{flags} {_FLAG}=false".strip()
    _log.info(
        "XLA_FLAGS is %r: with %s=false the largest and smallest of values with NaN are NaN, as in torch. A flag of "
        "that name that is there already stays",
        environment["XLA_FLAGS"],
        _FLAG,
    )
