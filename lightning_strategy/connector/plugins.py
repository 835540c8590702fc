"""The plugins that a strategy brings along: which accelerator, and which precision."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property
from typing import Any, Generic, TypeVar

from lightning.fabric.plugins import Precision as FabricPrecision
from lightning.pytorch.plugins.precision import Precision

from lightning_strategy.connector.accelerator import XLAEagerAccelerator, make_accelerator
from lightning_strategy.connector.flags import ConnectorFlags, flags_under_construction
from lightning_strategy.connector.precision import check_plugin, choose_precision, fabric_precision, precision_plugin
from lightning_strategy.connector.refusals import check_flags
from xla_adapters import get_runtime

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

    def adopt(self) -> None:
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
        return precision_plugin(precision, get_runtime().device.torch_device().type)

    def _set_in(self, connector: Any) -> None:
        if connector._precision_plugin_flag is None:
            connector._precision_plugin_flag = self.precision


class FabricPlugins(ConnectorPlugins[FabricPrecision]):
    """The plugins of a strategy of Fabric."""

    def _make(self, precision: str) -> FabricPrecision:
        return fabric_precision(precision, get_runtime().device.torch_device().type)

    def _set_in(self, connector: Any) -> None:
        connector.accelerator = self._own_accelerator
        if connector._precision_instance is None:
            connector._precision_instance = self.precision

    def _yields(self, flags: ConnectorFlags) -> bool:
        return flags.connector._precision_instance is not None and self._given is None
