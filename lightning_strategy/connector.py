"""Accelerator and precision, for which Lightning's connector asks a strategy while a Trainer or Fabric is made."""

from __future__ import annotations

import functools
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cached_property
from typing import Any, Generic, Literal, TypeVar, cast, get_args

import torch
from lightning.fabric import plugins as fabric_plugins
from lightning.fabric.connector import _Connector, _convert_precision_to_unified_args
from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.plugins import Precision as FabricPrecision
from lightning.fabric.strategies.registry import _StrategyRegistry
from lightning.fabric.utilities import throughput
from lightning.pytorch.accelerators import Accelerator, XLAAccelerator
from lightning.pytorch.callbacks import throughput_monitor
from lightning.pytorch.plugins import precision as trainer_plugins
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector

from lightning_strategy.checkpoints import XLAEagerCheckpointIO, with_writer
from lightning_strategy.refusals import ConnectorFlags, check_devices, check_flags, flags_under_construction
from lightning_strategy.sharding import ModuleSharding, plan_of
from xla_adapters import get_runtime
from xla_adapters.checkpoint import CheckpointConfig
from xla_adapters.errors import ConfigError, UnsupportedOptionError
from xla_adapters.sharding import ShardingPlan
from xla_adapters.utils.patching import replaced

XLAPrecisionFlag = Literal["32-true", "bf16-true", "bf16-mixed"]

_INSTEAD = {
    "16-mixed": "bf16-mixed",
    "16-true": "bf16-true",
    "64-true": "32-true",
    "transformer-engine": "bf16-mixed",
    "transformer-engine-float16": "bf16-mixed",
}
_WHY = {
    "16-mixed": "its gradient scaler reads gradients on the host at every step, and XLA devices compute in bfloat16",
    "16-true": "XLA devices compute in bfloat16, which has the range of float32",
    "64-true": "TPUs have no float64 units",
}


def unified_precision(flag: Any) -> str | None:
    """Lightning's canonical name of a precision flag (`"32-true"` for `32`); None for None.

    Raises:
        UnsupportedOptionError: Lightning has this precision, and XLA does not support it.
        ConfigError: there is no such precision.
    """
    if flag is None:
        return None
    valid = get_args(XLAPrecisionFlag)
    try:
        name = str(_convert_precision_to_unified_args(flag))
    except ValueError:
        listed = ", ".join(repr(value) for value in valid)
        raise ConfigError(f"precision={flag!r} is not a valid value; valid values: {listed}") from None
    if name not in valid:
        why = _WHY.get(name, "it needs CUDA kernels")
        raise UnsupportedOptionError(f"precision={flag!r}: {why}; use precision={_INSTEAD[name]!r}")
    return name


def choose_precision(own: str | None, flags: ConnectorFlags | None) -> str:
    """The precision in effect; `"32-true"` by default.

    Args:
        own: as given to the strategy, or None.
        flags: of the Trainer or Fabric that is being constructed, or None.

    Raises:
        ConfigError: they contradict each other, or are not valid.
        UnsupportedOptionError: XLA does not support the precision.
    """
    own = unified_precision(own)
    given = unified_precision(flags.precision) if flags is not None else None
    if own is not None and given is not None and own != given:
        raise ConfigError(
            f"precision was given twice and differently: {own!r} to the strategy and {given!r} beside it; give it once"
        )
    return own or given or "32-true"


def _precision_of(plugins: Any, precision: str) -> Any:
    """Lightning's plugin for one of the three precisions.

    Args:
        plugins: the module of the Trainer's plugins, or that of Fabric's.
        precision: its name.
    """
    if precision == "bf16-true":
        return plugins.HalfPrecision("bf16-true")
    if precision == "bf16-mixed":
        return plugins.MixedPrecision("bf16-mixed", get_runtime().device.torch_device().type)
    return plugins.Precision()


def check_plugin(plugin: Any, device_type: str) -> None:
    """Raises if the user's plugin cannot be part of a compiled step.

    Raises:
        UnsupportedOptionError: with the alternative.
    """
    if type(plugin) in (MixedPrecision, fabric_plugins.MixedPrecision) and plugin.device != device_type:
        raise UnsupportedOptionError(
            f"MixedPrecision(device={plugin.device!r}): autocast would be on for another device than the model's; use "
            "precision='bf16-mixed' instead of the plugin"
        )
    if getattr(plugin, "scaler", None) is not None or getattr(plugin, "precision", None) in ("16-mixed", "16-true"):
        raise UnsupportedOptionError(f"{type(plugin).__name__}: {_WHY['16-mixed']}; use precision='bf16-mixed'")


_STRATEGY = "XLAEagerStrategy"
_MEGABYTE = 1024.0 * 1024.0


class XLAEagerAccelerator(Accelerator):
    """The accelerator of `XLAEagerStrategy` and `XLAEagerFabricStrategy`.

    Lightning's `XLAAccelerator` counts the TPUs on the PCI bus and refuses every other device. Lightning takes each
    accelerator derived from it for TPUs: only `XLAEagerTPUAccelerator` is.
    """

    def setup_device(self, device: torch.device) -> None:
        """Does nothing: the runtime is started when the strategy is made."""

    def teardown(self) -> None:
        """Does nothing."""

    @staticmethod
    def is_available() -> bool:
        """True: XLA runs on the CPU, too."""
        return True

    @staticmethod
    def auto_device_count() -> int:
        """One, also under sharding: Lightning sees a single device that represents all of them."""
        return 1

    @staticmethod
    def parse_devices(devices: Any) -> int:
        """One device, as Lightning sees it.

        Raises:
            UnsupportedOptionError: several devices without sharding.
            ConfigError: under sharding, another number than there are devices.
        """
        check_devices(devices, _STRATEGY)
        return 1

    @staticmethod
    def get_parallel_devices(devices: Any) -> list[torch.device]:
        """The one device."""
        return [get_runtime().device.torch_device()]

    @staticmethod
    def name() -> str:
        """The name in log messages of Lightning."""
        return "xla"

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        """Memory of the device in MB, by name; the peak of the process if the device does not report it."""
        info = get_runtime().device.memory_info()
        if info:
            return {f"{name} (MB)": value / _MEGABYTE for name, value in info.items()}
        return {"peak process memory (MB)": _resident_bytes() / _MEGABYTE}


class XLAEagerTPUAccelerator(XLAEagerAccelerator, XLAAccelerator):  # type: ignore[misc]
    """The same where the devices are TPUs of torch_xla: Lightning prints how many it uses."""


def make_accelerator() -> XLAEagerAccelerator:
    """The accelerator for the devices of this process. Lightning's own is for TPUs of torch_xla."""
    runtime = get_runtime()
    is_known = runtime.name == "torch_xla" and runtime.device.hardware() == "TPU"
    return XLAEagerTPUAccelerator() if is_known else XLAEagerAccelerator()


def _resident_bytes() -> float:
    import resource
    import sys

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Linux counts it in kilobytes, macOS in bytes.
    return float(peak if sys.platform == "darwin" else peak * 1024)


_Plugin = TypeVar("_Plugin", bound=FabricPrecision)


class ConnectorPlugins(ABC, Generic[_Plugin]):
    """The accelerator and the precision plugin of one strategy, as Lightning's connector sees and sets them.

    Args:
        strategy: the name of the strategy's class, for messages.
        precision: as the user gave it to the strategy.

    Raises:
        ConfigError: the precision is not valid, or the Trainer or Fabric was given another one.
        UnsupportedOptionError: XLA does not support the precision.
    """

    def __init__(self, strategy: str, precision: str | None) -> None:
        self._strategy = strategy
        # Not None if the strategy was chosen by name: then the Trainer or Fabric is being constructed now.
        self._flags = flags_under_construction()
        chosen = choose_precision(precision, self._flags)
        self._given = chosen if precision is not None or self._flags is not None else None
        self._plugin: _Plugin | None = None

    @cached_property
    def _own_accelerator(self) -> XLAEagerAccelerator:
        return make_accelerator()

    # ---- accelerator ---------------------------------------------------------------------------

    def accelerator(self) -> XLAEagerAccelerator | None:
        """The strategy's accelerator; None while a connector is asking that was given the same device by name.

        Raises:
            ConfigError, UnsupportedOptionError: an argument of the Trainer or Fabric contradicts the strategy.
        """
        flags = flags_under_construction()
        if flags is not None:
            check_flags(flags, self._strategy)
            if flags.accelerator != "auto":
                # Lightning raises if both the strategy and the user name an accelerator.
                return None
        return self._own_accelerator

    # ---- precision -----------------------------------------------------------------------------

    @property
    def precision(self) -> _Plugin:
        """The plugin in effect: the one that was set, or one made for the chosen precision."""
        return self._make(self._given or "32-true") if self._plugin is None else self._plugin

    def set_precision(self, plugin: _Plugin | None) -> None:
        """Takes a plugin of the user's.

        Raises:
            UnsupportedOptionError: it cannot be part of a compiled step.
        """
        if plugin is not None:
            check_plugin(plugin, get_runtime().device.torch_device().type)
        self._plugin = plugin

    def precision_for_connector(self) -> _Plugin | None:
        """The plugin that was set; while a connector is asking also one made for the chosen precision.

        Raises:
            ConfigError, UnsupportedOptionError: the Trainer's or Fabric's precision is not valid or contradicts.
        """
        flags = flags_under_construction()
        if flags is None or self._plugin is not None or self._yields(flags):
            return self._plugin
        return self._make(choose_precision(self._given, flags))

    def set_plugins(self) -> None:
        """Sets the plugins of a connector that chose the strategy by name: it does not ask such a strategy.

        Raises:
            ConfigError, UnsupportedOptionError: an argument of the Trainer or Fabric contradicts the strategy.
        """
        flags, self._flags = self._flags, None
        if flags is not None:
            check_flags(flags, self._strategy)
            self._set_in(flags.connector)

    @abstractmethod
    def _make(self, precision: str) -> _Plugin:
        """Lightning's plugin for a precision."""

    @abstractmethod
    def _set_in(self, connector: Any) -> None:
        """Sets the plugins in a connector, unless the user gave others."""

    def _yields(self, flags: ConnectorFlags) -> bool:
        """Whether the connector has a plugin of the user's that it is going to use."""
        return False


class TrainerPlugins(ConnectorPlugins[Precision]):
    """The plugins of a strategy of the Trainer."""

    def _make(self, precision: str) -> Precision:
        return cast(Precision, _precision_of(trainer_plugins, precision))

    def _set_in(self, connector: Any) -> None:
        if connector._precision_plugin_flag is None:
            connector._precision_plugin_flag = self.precision


class FabricPlugins(ConnectorPlugins[FabricPrecision]):
    """The plugins of a strategy of Fabric."""

    def _make(self, precision: str) -> FabricPrecision:
        return cast(FabricPrecision, _precision_of(fabric_plugins, precision))

    def _set_in(self, connector: Any) -> None:
        connector.accelerator = self._own_accelerator
        if connector._precision_instance is None:
            connector._precision_instance = self.precision

    def _yields(self, flags: ConnectorFlags) -> bool:
        return flags.connector._precision_instance is not None and self._given is None


NAME = "xla_eager"


class StrategyHooks:
    """What Lightning and the user ask of both strategies, that of the Trainer and that of Fabric."""

    strategy_name = NAME
    checkpoint_config: CheckpointConfig
    _plugins: ConnectorPlugins[Any]
    _sharding: ModuleSharding | None
    _checkpoint_io: CheckpointIO | None

    @property
    def _accelerator(self) -> Any:
        return self._plugins.accelerator()

    @_accelerator.setter
    def _accelerator(self, accelerator: Any) -> None:
        """Does nothing: the device is the strategy's, also where Lightning chose another for the flag `"auto"`."""

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """The user's, or `XLAEagerCheckpointIO`."""
        if self._checkpoint_io is None:
            self._checkpoint_io = XLAEagerCheckpointIO(self.checkpoint_config)
        return with_writer(self._checkpoint_io)

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO | None) -> None:
        self._checkpoint_io = io

    @property
    def sharding_plan(self) -> ShardingPlan:
        """The plan of the module or model that was prepared last.

        Raises:
            ConfigError: it is not sharded, or none was prepared yet.
        """
        return plan_of(self._sharding, type(self).__name__)

    @classmethod
    def register_strategies(cls, strategy_registry: _StrategyRegistry) -> None:
        """Registers the strategy as `"xla_eager"`."""
        strategy_registry.register(cls.strategy_name, cls, description=cls.__name__)


_STRATEGIES: tuple[tuple[Any, str], ...] = (
    (_AcceleratorConnector, "XLAEagerStrategy"),
    (_Connector, "XLAEagerFabricStrategy"),
)


def warn_where_auto_takes_the_cpu() -> None:
    """From now on a Trainer or Fabric that chooses the CPU by itself on a machine with such a TPU warns.

    Those with a strategy of this package do not choose.
    """
    for connector, strategy in _STRATEGIES:
        choose = connector._choose_auto_accelerator
        if not hasattr(choose, "of_xla_adapters"):
            connector._choose_auto_accelerator = staticmethod(_warning(choose, strategy))


def _warning(choose: Callable[[], str], strategy: str) -> Callable[[], str]:
    @functools.wraps(choose)
    def chosen() -> str:
        name = choose()
        if name == "cpu" and _has_tpu() and not _chose_ours():
            warnings.warn(
                f"accelerator='auto' takes the CPU, though there is a TPU: Lightning does not know TorchTPU. Give "
                f"strategy=lightning_strategy.{strategy}() to train on it, or accelerator='cpu' if that is meant",
                UserWarning,
                stacklevel=2,
            )
        return name

    chosen.of_xla_adapters = True  # type: ignore[attr-defined]
    return chosen


def _chose_ours() -> bool:
    """Whether the Trainer or Fabric that is being made was given a strategy of this package by its name."""
    flags = flags_under_construction()
    return flags is not None and flags.connector._strategy_flag == NAME


def _has_tpu() -> bool:
    device = torch.accelerator.current_accelerator()
    return device is not None and device.type == "tpu"


# Captured on import: a function that a user has put in its place is called as it is.
_STOCK = throughput.get_available_flops


@contextmanager
def flops_of_devices() -> Iterator[None]:
    """Until the exit, `get_available_flops` knows devices that are no TPUs, and counts all TPUs of a mesh.

    Lightning's own function takes every XLA device for a TPU, and asks the metadata server of the TPU which one it is.
    """
    with ExitStack() as stack:
        for module in (throughput, throughput_monitor):
            if vars(module)["get_available_flops"] is _STOCK:
                stack.enter_context(replaced(module, "get_available_flops", _available))
        yield


def _available(device: torch.device, dtype: Any) -> int | None:
    runtime = get_runtime()
    own = runtime.device
    if device.type != own.torch_device().type:
        return _STOCK(device, dtype)
    if runtime.name != "torch_xla" or own.hardware() != "TPU":
        return None
    flops = _STOCK(device, dtype)
    return flops * own.count() if flops is not None and own.is_spmd() else flops
