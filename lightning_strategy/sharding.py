"""Sharding under Lightning: when a module is cut, and what a run loads, swaps or uploads is cut again."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning.pytorch.loops.prediction_loop
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import CombinedLoader
from lightning_utilities.core.apply_func import apply_to_collection
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from lightning_strategy.checkpoints import on_host
from xla_adapters import XLAConfig, get_backend
from xla_adapters.batches import example_of, sample_count
from xla_adapters.errors import ConfigError, RuntimeOrderError
from xla_adapters.host_random import host_random_numbers_kept
from xla_adapters.patching import replaced
from xla_adapters.sharding import ShardingConfig
from xla_adapters.sharding.plan import ShardingPlan
from xla_adapters.sharding.sharder import Sharder
from xla_adapters.transfers import to_host_in_one_transfer

ShardingOption = str | Mapping[str, Any] | ShardingConfig | None
AutoShardingOption = bool | Mapping[str, Any] | None


class ModuleSharding:
    """The sharding of what one strategy trains. Each module has a plan of its own.

    Args:
        sharding: the options of sharding.
        config: the other options of the strategy.

    Raises:
        ConfigError: the mesh that was asked for needs another number of devices.
        UnsupportedOptionError: the mode, or the compiler of this device, cannot do what was asked for.
    """

    def __init__(self, sharding: ShardingConfig, config: XLAConfig) -> None:
        self._make_sharder = functools.partial(Sharder, sharding, config)
        self._sharder = self._make_sharder()
        self._sharders: weakref.WeakKeyDictionary[torch.nn.Module, Sharder] = weakref.WeakKeyDictionary()
        self._is_size_checked = False

    @property
    def config(self) -> ShardingConfig:
        """How it shards."""
        return self._sharder.config

    @property
    def saves_parts(self) -> bool:
        """Whether checkpoints are written in parts."""
        return self._sharder.config.checkpoints == "sharded"

    @property
    def plan(self) -> ShardingPlan:
        """Of the module that was prepared last.

        Raises:
            ConfigError: there is none yet.
        """
        return self._sharder.plan

    def prepare(
        self, module: torch.nn.Module, example: Callable[[], Any] = lambda: None, folder: Path | None = None
    ) -> None:
        """Plans for a module, if that is not done yet, and cuts its parameters.

        Args:
            module: on the device.
            example: returns a batch for its `forward` on the host, or `None`; called if the plan depends on it.
            folder: of the run, where the plan is kept for a restart; None keeps nothing.

        Raises:
            ConfigError: nothing fits what was asked for.
        """
        if module not in self._sharders:
            self._sharders[module] = self._sharder if self._sharder.placement is None else self._make_sharder()
        sharder = self._sharders[module]
        sharder.prepare(module, lambda: _arguments(module, example()), folder=folder)
        self._sharder = sharder
        self._is_size_checked = False

    def cut_again(self, module: torch.nn.Module) -> None:
        """Cuts what was cut before: a value that was copied in is whole."""
        placement = self._sharders[module].placement
        if placement is not None:
            placement.place_model(module)

    def place_batch(self, batch: Any) -> None:
        """Cuts all tensors of a batch, in dataclasses too."""
        apply_to_collection(batch, torch.Tensor, self._sharder.place_batch, allow_frozen=True)

    def check_first_batch(self, batch: Any) -> None:
        """Raises if the first batch of a training cannot be split; later ones are held whole then.

        Raises:
            ConfigError: with the nearest sizes that work.
        """
        is_due = not self._is_size_checked and self._sharder.placement is not None
        if is_due and (size := sample_count(batch)):
            self._sharder.check_batch_size(size, "batch_size")
            self._is_size_checked = True

    @contextmanager
    def holding(self, module: torch.nn.Module) -> Iterator[None]:
        """Around a run: intermediate values are held to the plan, loaded weights are cut."""
        with self._sharders[module].holding(module), _predictions_in_one_transfer():
            yield


def make_sharding(
    strategy: str, config: XLAConfig, *, auto_sharding: AutoShardingOption, sharding: ShardingOption
) -> ModuleSharding | None:
    """The sharding that a strategy's options ask for; drives all devices as one from then on.

    Args:
        strategy: its name, for messages.
        config: its other options.
        auto_sharding, sharding: as the user gave them.

    Raises:
        ConfigError: an option is not valid, or does not fit the devices.
        UnsupportedOptionError: sharding does not go together with the mode.
        RuntimeOrderError: the runtime was started without SPMD before.
    """
    resolved = ShardingConfig.resolve(auto_sharding=auto_sharding, sharding=sharding)
    if resolved is None:
        return None
    backend = get_backend()
    if backend.runtime_started() and not backend.is_spmd():
        raise RuntimeOrderError(
            f"{strategy} with sharding was created after the XLA runtime had started without SPMD (a tensor, a model "
            "or another strategy used the device already), and SPMD cannot be switched on any more. Create this "
            "strategy first, before anything is moved to the XLA device, or call xla_adapters.initialize(spmd=True) at "
            "the start of the program"
        )
    return ModuleSharding(resolved, config)


def plan_of(sharding: ModuleSharding | None, strategy: str) -> ShardingPlan:
    """The plan in effect.

    Raises:
        ConfigError: the strategy does not shard, or nothing is planned yet.
    """
    if sharding is None:
        raise ConfigError(f"this {strategy} does not shard; create it with auto_sharding=True or sharding=")
    return sharding.plan


def bring_to_host(module: torch.nn.Module | None, optimizers: list[Optimizer]) -> None:
    """Moves a cut module and its optimizers' state to the host; `module.cpu()` would compile a graph per tensor."""
    if module is not None:
        tensors = [*module.parameters(), *module.buffers()]
        tensors += [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
        copies = dict(zip(map(id, tensors), to_host_in_one_transfer(tensors), strict=True))
        module._apply(lambda tensor: copies[id(tensor)] if id(tensor) in copies else tensor.cpu())
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            optimizer.state[parameter] = to_host_in_one_transfer(state)


@contextmanager
def _predictions_in_one_transfer() -> Iterator[None]:
    """Lets the Trainer bring predictions to the host without a graph for each tensor that is cut, until the exit."""
    loop: Any = lightning.pytorch.loops.prediction_loop
    stock: Callable[[Any, Any], Any] = loop.move_data_to_device

    @functools.wraps(stock)
    def move_data_to_device(batch: Any, device: Any) -> Any:
        if torch.device(device).type == "cpu":
            batch = on_host({"predictions": batch})["predictions"]
        return stock(batch, device)

    with replaced(loop, "move_data_to_device", move_data_to_device):
        yield


# ---- an example to plan with -------------------------------------------------------------------


def example_batch(trainer: Trainer) -> Any:
    """A batch like those of the run, on the host, made of copies of the first sample; `None` for a stream of data.

    Nothing is taken from the loaders, and no random number: what the run sees is the same.
    """
    source = {
        TrainerFn.FITTING: lambda: trainer.fit_loop._data_source,
        TrainerFn.VALIDATING: lambda: trainer.validate_loop._data_source,
        TrainerFn.TESTING: lambda: trainer.test_loop._data_source,
        TrainerFn.PREDICTING: lambda: trainer.predict_loop._data_source,
    }.get(trainer.state.fn or TrainerFn.FITTING)
    assert source is not None
    with host_random_numbers_kept():
        return _example_of(source().dataloader(), whole=trainer.state.fn == TrainerFn.FITTING)


def _example_of(loaders: Any, *, whole: bool) -> Any:
    """Of one loader, or of several: a batch of all together in training, and of the first in an evaluation."""
    if isinstance(loaders, CombinedLoader):
        return _example_of(loaders.iterables, whole=loaders._mode != "sequential")
    if isinstance(loaders, DataLoader):
        return _example_of_loader(loaders)
    if isinstance(loaders, Mapping) and loaders:
        found = {name: _example_of(loader, whole=whole) for name, loader in loaders.items()}
        examples = list(found.values())
        return (None if any(item is None for item in examples) else found) if whole else examples[0]
    if isinstance(loaders, (list, tuple)) and loaders:
        examples = [_example_of(loader, whole=whole) for loader in loaders]
        return (None if any(item is None for item in examples) else examples) if whole else examples[0]
    return None


def _example_of_loader(loader: DataLoader[Any]) -> Any:
    size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
    return None if size is None else example_of(loader.dataset, size, loader.collate_fn)


def _arguments(module: torch.nn.Module, batch: Any) -> Any:
    """What of a batch is for `forward`: steps of Lightning take the whole batch, labels too."""
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
