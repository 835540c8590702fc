"""`XLADevice`: starts torch_xla, and answers questions about its devices and processes."""

from __future__ import annotations

import functools
import logging
import os
import warnings
from collections.abc import Callable, MutableMapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch_xla
import torch_xla.core.xla_env_vars as xenv
import torch_xla.core.xla_model as xm
import torch_xla.debug.profiler as profiler
import torch_xla.runtime as xr
from torch_xla.experimental import plugins

from xla_adapters.config import CacheDir
from xla_adapters.errors import ConfigError, RuntimeOrderError, UnsupportedOptionError
from xla_adapters.runtime.compile_cache import COMPILE_CACHE, use_compile_cache, why_missing, wrap_libtpu
from xla_adapters.runtime.extensions import initialize_extensions
from xla_adapters.runtime.interface.device import DEFAULT_TUNING, Tuning
from xla_adapters.runtime.patches import keep_parameters_when_moved, run_backward_where_it_is_called
from xla_adapters.runtime.torch_xla.counters import COMPILE_MEMORY, has_started, wait
from xla_adapters.runtime.torch_xla.operators import complete_autocast, register_kernels
from xla_adapters.runtime.torch_xla.patches import (
    count_tpus_without_asking,
    linearize_without_trace,
    run_scans_in_eager_mode,
)
from xla_adapters.runtime.torch_xla.random_numbers import seed_with_torch

_log = logging.getLogger("xla_adapters")
_C = torch_xla._XLAC
_CPU_PLUGIN = "xla_plugins.xla_cpu_pjrt"
# For torch_xla what stands before the underscore is the kind of device.
_CACHED_CPU = "CPU_CACHED"
# Variables that torch_xla reads once.
_READ_AT_START = (xenv.PJRT_DEVICE, "CPU_NUM_DEVICES")
# Devices whose maxima and minima leave NaN out, unless this flag is set.
_LOSE_NAN = frozenset({"CPU"})
_FLAG = "--xla_cpu_enable_fast_min_max"
_AUTO = (
    "xr.use_spmd(auto=True) (or XLA_AUTO_SPMD=1): torch_xla 2.9's own automatic sharding splits nothing but on TPUs, "
    "and costs one more compile. Leave it out, and say what is to be sharded: Trainer(..., auto_sharding=True), "
    "XLAEagerStrategy(auto_sharding=True), or in a loop of your own xla_adapters.initialize(spmd=True) and "
    'xla_adapters.distribute_module(model, partition_fn="AUTO", example=batch)'
)


class _CPUPlugin(plugins.DevicePlugin):  # type: ignore[misc]
    """CPU devices behind the PJRT C API.

    Args:
        library: the plugin's.
    """

    def __init__(self, library: Path) -> None:
        super().__init__()
        self._library = library

    def library_path(self) -> str:
        """As of `DevicePlugin`."""
        return str(self._library)

    def client_create_options(self) -> dict[str, int]:
        """As of `DevicePlugin`: as many devices as torch_xla's own."""
        return {"cpu_device_count": int(os.environ.get("CPU_NUM_DEVICES", "1"))}


def _refuse_profile(*args: Any, **kwargs: Any) -> None:
    raise UnsupportedOptionError(
        "a profile with a compile cache on CPU devices: those of xla-cpu-pjrt, which take the place of torch_xla's own "
        "then, have no profiler. Leave cache_dir (or XLA_ADAPTERS_CACHE_DIR) out to record one"
    )


class XLADevice:
    """`Device` on torch_xla: any PJRT device, or the virtual device under SPMD."""

    def __init__(self) -> None:
        self._initialized = self._has_sync_points = False
        self._device: torch.device | None = None
        self._started_with: dict[str, str | None] = {}

    def prepare(self) -> None:
        """See `Device`; sets `XLA_FLAGS`, which is logged."""
        keep_nan(self.hardware(), started=self.started())
        self.use_compile_cache(None)

    def initialize(self, *, spmd: bool = False, tuning: Tuning = DEFAULT_TUNING) -> None:
        """See `Device`; switches SPMD on first if asked for."""
        if not self._initialized:
            self.prepare()
        self._check_variables()
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
        if os.environ.get(xenv.PJRT_DEVICE) == _CACHED_CPU:
            # Processes that this one starts do not have the plugin.
            os.environ[xenv.PJRT_DEVICE] = "CPU"
        self._device = torch_xla.device()
        complete_autocast()
        register_kernels()
        keep_parameters_when_moved("xla")
        run_backward_where_it_is_called()
        linearize_without_trace()
        run_scans_in_eager_mode()
        count_tpus_without_asking()
        seed_with_torch(had_started=had_started)
        self._started_with = {name: os.environ.get(name) for name in _READ_AT_START}
        self._initialized = True

    def _check_variables(self) -> None:
        for name, value in self._started_with.items():
            if (now := os.environ.get(name)) != value and now is not None:
                raise RuntimeOrderError(
                    f"{name} was set to {now!r} after the XLA runtime had started with {value or 'its default'}; it is "
                    "read only then. Set it in the environment of the program, or before anything uses the device"
                )

    def use_compile_cache(self, cache_dir: CacheDir) -> None:
        """See `Device`; sets `TPU_LIBRARY_PATH` or, of CPU devices, `PJRT_DEVICE` until the runtime has started."""
        use_compile_cache(
            cache_dir,
            COMPILE_CACHE,
            by_default=self.hardware() != "CPU",
            has_started=self.started(),
            prepare=self._wrap_plugin,
        )

    def _wrap_plugin(self) -> str | None:
        """Has torch_xla load the caching plugin around the device's own; returns why it cannot, as a clause."""
        missing = why_missing()
        if missing is not None:
            return missing
        hardware = self.hardware()
        if hardware == "CPU":
            return self._use_cpu_plugin()
        if hardware == "TPU":
            return wrap_libtpu()
        plugin = plugins._plugin_registry.get(hardware)
        if plugin is None:
            return f"torch_xla knows no plugin for {hardware} devices"
        library = COMPILE_CACHE.wrap(Path(plugin.library_path()), compiles_for_host=True)
        plugin.library_path = lambda: str(library)
        return None

    def _use_cpu_plugin(self) -> str | None:
        # torch_xla has its own CPU devices built in, and no plugin of the name "CPU" takes their place.
        spec = find_spec(_CPU_PLUGIN) if find_spec(_CPU_PLUGIN.partition(".")[0]) else None
        if spec is None or spec.origin is None:
            return (
                "torch_xla's own CPU devices cannot load programs. Install xla-cpu-pjrt==0.0.1, whose CPU devices take "
                "their place then"
            )
        wrapped = Path(spec.origin).with_name("xla_cpu_pjrt.so")
        plugins.register_plugin(
            _CACHED_CPU, _CPUPlugin(COMPILE_CACHE.wrap(wrapped, compiles_for_host=True, pads_options=True))
        )
        os.environ[xenv.PJRT_DEVICE] = _CACHED_CPU
        # Without this torch_xla ends the process.
        profiler.start_trace = _refuse_profile
        _log.info("torch_xla's own CPU devices cannot load programs, so those of xla-cpu-pjrt take their place")
        return None

    def started(self) -> bool:
        """See `Device`."""
        return has_started()

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

    def launched(self) -> int:
        """See `Device`; a process drives all devices, by SPMD."""
        return 1

    def prepare_launch(self, processes: int | None) -> int:
        """See `Device`."""
        raise ConfigError(
            "launch: with torch_xla one process drives all devices of a machine. Start the script with python, and "
            "give the trainer sharding='dp', or auto_sharding=True"
        )

    def world_size(self) -> int:
        """See `Device`."""
        return int(xr.world_size())

    def process_index(self) -> int:
        """See `Device`."""
        return int(xr.global_ordinal())

    @property
    def ranks(self) -> None:
        """See `Device`; a process drives all devices, by SPMD."""
        return None

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
        wait()

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


def set_flags_of_tpu() -> None:
    """Sets LIBTPU_INIT_ARGS as torch_xla does when it is imported on a host with TPUs (`TPU_ACCELERATOR_TYPE`)."""
    torch_xla._setup_libtpu_flags()


def keep_nan(hardware: str, *, started: bool, environment: MutableMapping[str, str] = os.environ) -> None:
    """Has the largest and smallest of values be NaN if one of them is, as in torch; for CPU devices.

    XLA:CPU takes such a value for none otherwise: in `amax`, `max`, max pooling and `scatter_reduce`. Logged at INFO on
    each call, since logging is usually not configured yet as a Trainer is imported. A flag that the user has set stays
    as it is.

    Args:
        hardware: of the process; other devices need no flag.
        started: whether the runtime runs already, so that the flag comes too late; warns.
        environment: the environment to change.

    Raises:
        ConfigError: XLA_FLAGS names a file that cannot be read.
    """
    if hardware not in _LOSE_NAN:
        return
    if not started:
        _read_flags(environment)
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


def _read_flags(environment: MutableMapping[str, str]) -> None:
    """Puts the flags of a file that XLA_FLAGS names in its place: after a name XLA takes no further flags."""
    name = environment.get("XLA_FLAGS", "").strip()
    if not name or name.startswith("-"):
        return
    try:
        flags = Path(name).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"XLA_FLAGS={name!r} has no flag in front, so that XLA takes it for the name of a file, which cannot be "
            f"read ({error}). Begin it with a flag (--...), or name a file of flags"
        ) from error
    environment["XLA_FLAGS"] = " ".join(flags.splitlines()).strip()
    _log.info("XLA_FLAGS named the file %s, and is what that holds from now on", name)
