"""`ModuleSharding`: the sharding of the modules that one strategy trains."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection

from lightning_strategy.sharding.host import predictions_in_one_transfer
from xla_adapters import XLAConfig, get_runtime
from xla_adapters.data.batches import sample_count
from xla_adapters.errors import ConfigError, RuntimeOrderError
from xla_adapters.sharding import Sharder, ShardingConfig, ShardingPlan

ShardingOption = str | Mapping[str, Any] | ShardingConfig | None
AutoShardingOption = bool | Mapping[str, Any] | None


class ModuleSharding:
    """Plans how modules and batches are sharded, and shards them. Each module has a plan of its own.

    Args:
        sharding: the options of sharding.
        config: the other options of the strategy.

    Raises:
        ConfigError: the mesh needs another number of devices than there are.
        UnsupportedOptionError: the mode, or the compiler of this device, does not support the options.
    """

    def __init__(self, sharding: ShardingConfig, config: XLAConfig) -> None:
        self._given = sharding, config
        self._make_sharder = functools.partial(Sharder, sharding, config)
        self._sharder = self._make_sharder()
        self._sharders: weakref.WeakKeyDictionary[torch.nn.Module, Sharder] = weakref.WeakKeyDictionary()
        self._is_size_checked = False

    def __reduce__(self) -> tuple[type[ModuleSharding], tuple[ShardingConfig, XLAConfig]]:
        """A copy has the same options, and plans its modules anew."""
        return type(self), self._given

    @property
    def config(self) -> ShardingConfig:
        """The options of sharding."""
        return self._sharder.config

    @property
    def saves_shards(self) -> bool:
        """Whether checkpoints are sharded, too."""
        return self._sharder.config.checkpoints == "sharded"

    @property
    def plan(self) -> ShardingPlan:
        """The plan of the module that was prepared last.

        Raises:
            ConfigError: no module was prepared yet.
        """
        return self._sharder.plan

    def summary(self) -> str:
        """The plan in words; empty if there is none yet."""
        return self._sharder.summary

    def prepare(
        self, module: torch.nn.Module, example: Callable[[], Any] = lambda: None, folder: Path | None = None
    ) -> None:
        """Plans for a module, unless it has a plan already, and shards its parameters.

        Args:
            module: on the device.
            example: returns a batch on the host, or None; called only if the plan depends on the batch.
            folder: of the run, where the plan is saved for a restart; None does not save it.

        Raises:
            ConfigError: no plan satisfies the options.
        """
        if module not in self._sharders:
            self._sharders[module] = self._sharder if self._sharder.placement is None else self._make_sharder()
        sharder = self._sharders[module]
        sharder.prepare(module, lambda: _arguments(module, example()), folder=folder)
        self._sharder = sharder
        self._is_size_checked = False

    def shard_again(self, module: torch.nn.Module) -> None:
        """Shards a module's parameters again: values that were copied into them are not sharded."""
        placement = self._sharders[module].placement
        if placement is not None:
            placement.place_model(module)

    def place_batch(self, batch: Any) -> None:
        """Shards all tensors of a batch, in dataclasses too."""
        apply_to_collection(batch, torch.Tensor, self._sharder.place_batch, allow_frozen=True)

    def check_first_batch(self, batch: Any) -> None:
        """Raises if the first batch of a training cannot be split over the devices.

        A later batch that cannot be split is replicated.

        Raises:
            ConfigError: with the nearest sizes that work.
        """
        is_due = not self._is_size_checked and self._sharder.placement is not None
        if is_due and (size := sample_count(batch)):
            self._sharder.check_batch_size(size, "batch_size")
            self._is_size_checked = True

    @contextmanager
    def holding(self, module: torch.nn.Module) -> Iterator[None]:
        """Until the exit, intermediate values are sharded as planned, and weights that are loaded are sharded."""
        with self._sharders[module].holding(module), predictions_in_one_transfer():
            yield


def make_sharding(
    strategy: str, config: XLAConfig, *, auto_sharding: AutoShardingOption, sharding: ShardingOption
) -> ModuleSharding | None:
    """The sharding that a strategy's options ask for, None if none; starts the XLA runtime under SPMD if any.

    Args:
        strategy: its name, for messages.
        config: its other options.
        auto_sharding, sharding: as the user gave them.

    Raises:
        ConfigError: an option is not valid, or does not fit the devices.
        UnsupportedOptionError: the mode does not support sharding.
        RuntimeOrderError: the runtime was started without SPMD before.
    """
    resolved = ShardingConfig.resolve(auto_sharding=auto_sharding, sharding=sharding)
    if resolved is None:
        return None
    runtime = get_runtime()
    if runtime.device.started() and not runtime.device.is_spmd():
        raise RuntimeOrderError(
            f"{strategy} with sharding was created after the XLA runtime had started without SPMD (a tensor, a model "
            "or another strategy used the device already), and SPMD cannot be switched on any more. Create this "
            "strategy first, before anything is moved to the XLA device, or call xla_adapters.initialize(spmd=True) at "
            "the start of the program"
        )
    return ModuleSharding(resolved, config)


def plan_of(sharding: ModuleSharding | None, strategy: str) -> ShardingPlan:
    """The plan of the module that a strategy trains.

    Args:
        sharding: of the strategy.
        strategy: its name, for the message.

    Raises:
        ConfigError: the strategy does not shard, or no plan was made yet.
    """
    if sharding is None:
        raise ConfigError(f"this {strategy} does not shard; create it with auto_sharding=True or sharding=")
    return sharding.plan


def _arguments(module: torch.nn.Module, batch: Any) -> Any:
    """The arguments for `forward` in a batch: Lightning's steps take the whole batch, labels too."""
    if batch is None:
        return None
    if isinstance(batch, torch.Tensor):
        return (batch,)
    parameters = inspect.signature(module.forward).parameters.values()
    if isinstance(batch, Mapping):
        takes_all = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)
        names = {parameter.name for parameter in parameters}
        return {name: value for name, value in batch.items() if takes_all or name in names}
    if any(parameter.kind is inspect.Parameter.VAR_POSITIONAL for parameter in parameters):
        return tuple(batch)
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(batch)[: sum(parameter.kind in positional for parameter in parameters)]
