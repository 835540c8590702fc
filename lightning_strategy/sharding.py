"""Moving and sharding the modules, optimizers and batches of a strategy."""

from __future__ import annotations

import functools
import inspect
import os
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning.pytorch.loops.prediction_loop
import torch
import torchmetrics.metric
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import CombinedLoader, find_shared_parameters, set_shared_parameters
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning_utilities.core.apply_func import apply_to_collection
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from xla_adapters import XLAConfig, get_runtime, in_step
from xla_adapters.data.batches import example_of, sample_count
from xla_adapters.errors import ConfigError, RuntimeOrderError
from xla_adapters.runtime.ranks import Ranks
from xla_adapters.runtime.transfers import to_host_in_one_transfer, uploading
from xla_adapters.sharding import (
    DataParallel,
    Sharder,
    ShardingConfig,
    ShardingPlan,
    gathered_in_step,
    launched_ranks,
    reduced_in_step,
)
from xla_adapters.utils.host_random import host_random_numbers_kept
from xla_adapters.utils.nested_values import identity
from xla_adapters.utils.patching import replaced


@contextmanager
def keeping_ties(model: torch.nn.Module | None) -> Iterator[None]:
    """Parameters that are one before the body moves the model are one after it (tied weights)."""
    shared = find_shared_parameters(model) if model is not None else []
    yield
    if model is not None:
        set_shared_parameters(model, shared)


@contextmanager
def optimizers_following(model: torch.nn.Module | None, optimizers: Iterable[Optimizer]) -> Iterator[None]:
    """Optimizers refer to the parameters that the model has after the body has moved it, and free those from before."""
    before = {} if model is None else dict(model.named_parameters(remove_duplicate=False))
    yield
    if model is None:
        return
    now = dict(model.named_parameters(remove_duplicate=False))
    successors: dict[torch.Tensor, torch.Tensor] = {before[name]: now[name] for name in before if name in now}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"][:] = [successors.get(parameter, parameter) for parameter in group["params"]]
        states = list(optimizer.state.items())
        optimizer.state.clear()
        optimizer.state.update({successors.get(parameter, parameter): state for parameter, state in states})


class HostCopy(dict[str, Any]):
    """A checkpoint that is a copy already, so that a save in the background need not copy it.

    Args:
        copied: the copy.
    """

    def __init__(self, copied: dict[str, Any]) -> None:
        super().__init__(copied)
        self.copied = copied


def on_host(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """A copy of a checkpoint with all tensors on the host, in one transfer.

    Tensors that are one on the device (tied weights) are one on the host. A writer in the background needs the copy,
    too: the next step reuses the device's buffers (donation).

    Args:
        checkpoint: nested collections; tensors that are on the host already are not copied.
    """
    runtime = get_runtime()
    found: dict[tuple[object, ...], torch.Tensor] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if runtime.device.owns(tensor):
            found.setdefault(identity(tensor), tensor)
        return tensor

    apply_to_collection(checkpoint, torch.Tensor, note)
    copies = dict(zip(found, runtime.transfers.to_host(list(found.values())), strict=True))

    def replace(tensor: torch.Tensor) -> torch.Tensor:
        return copies.get(identity(tensor), tensor) if runtime.device.owns(tensor) else tensor

    converted: dict[str, Any] = apply_to_collection(checkpoint, torch.Tensor, replace)
    for name, value in checkpoint.items():
        # The versions of the modules in a state dict: `apply_to_collection` drops this attribute.
        if isinstance(value, OrderedDict) and hasattr(value, "_metadata"):
            converted[name]._metadata = value._metadata
    return converted


def bring_to_host(module: torch.nn.Module | None, optimizers: list[Optimizer]) -> None:
    """Moves a sharded module and its optimizers' states to the host, in one transfer each.

    `module.cpu()` would compile a graph for each tensor.
    """
    if module is not None:
        tensors = [*module.parameters(), *module.buffers()]
        tensors += [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
        copies = dict(zip(map(id, tensors), to_host_in_one_transfer(tensors), strict=True))
        module._apply(lambda tensor: copies[id(tensor)] if id(tensor) in copies else tensor.cpu())
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            optimizer.state[parameter] = to_host_in_one_transfer(state)


@contextmanager
def predictions_in_one_transfer() -> Iterator[None]:
    """Until the exit, the Trainer moves predictions to the host without compiling a graph for each sharded tensor."""
    loop: Any = lightning.pytorch.loops.prediction_loop
    stock: Callable[[Any, Any], Any] = loop.move_data_to_device

    @functools.wraps(stock)
    def move_data_to_device(batch: Any, device: Any) -> Any:
        if torch.device(device).type == "cpu":
            batch = on_host({"predictions": batch})["predictions"]
        return stock(batch, device)

    with replaced(loop, "move_data_to_device", move_data_to_device):
        yield


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
    strategy: str,
    config: XLAConfig,
    *,
    auto_sharding: AutoShardingOption,
    sharding: ShardingOption,
    shapes: object = None,
) -> tuple[ModuleSharding | None, DataParallel | None, ShardingConfig | None]:
    """The sharding that a strategy's options ask for, None if none; starts the XLA runtime under SPMD if any. What
    trains together with other processes, None in one process. And the options.

    Args:
        strategy: its name, for messages.
        config: its other options.
        auto_sharding, sharding, shapes: as the user gave them.

    Raises:
        ConfigError: an option is not valid, or does not fit the devices.
        UnsupportedOptionError: the mode does not support sharding.
        RuntimeOrderError: the runtime was started without SPMD before.
    """
    resolved = ShardingConfig.resolve(auto_sharding=auto_sharding, sharding=sharding)
    if (ranks := launched_ranks(resolved, config, shapes)) is not None:
        return None, ranks, resolved
    if resolved is None:
        return None, None, None
    try:
        return ModuleSharding(resolved, config), None, resolved
    except RuntimeOrderError as error:
        raise RuntimeOrderError(
            f"{strategy} with sharding was created after the XLA runtime had started without SPMD (a tensor, a model "
            "or another strategy used the device already), and SPMD cannot be switched on any more. Create this "
            "strategy first, before anything is moved to the XLA device, or call xla_adapters.initialize(spmd=True) at "
            "the start of the program"
        ) from error


@contextmanager
def as_one_of(ranks: Ranks, trainer: Trainer, *, saves_at_signals: bool) -> Iterator[None]:
    """Until the exit, the Trainer gives loaders a sampler for the rank's part, and ranks exchange on the host what no
    step computes.

    Lightning gives such a sampler only to strategies that it knows as parallel. For signals it broadcasts on the
    device, in the handler, too, and ends the rank that was signalled before the others know. torchmetrics gathers a
    state by several launches.

    Args:
        ranks: that train together.
        trainer: of this rank.
        saves_at_signals: whether a signal is for a save (`save_on="preemption"`), which ends the training itself.
    """
    signals: Any = type(trainer._signal_connector)
    was_signalled = False

    def note_signal(self: Any, number: Any, frame: Any) -> None:
        nonlocal was_signalled
        was_signalled = True

    stock: Any = Trainer.distributed_sampler_kwargs
    loop: Any = type(trainer.fit_loop.epoch_loop)

    def kwargs(self: Trainer) -> Any:
        return trainer.strategy.distributed_sampler_kwargs if self is trainer else stock.fget(self)  # type: ignore[attr-defined]

    def look_for_signals(self: Any) -> None:
        if not saves_at_signals and ranks.total(was_signalled, "the signals before a batch"):
            trainer._signal_connector.received_sigterm = True
            raise SIGTERMException

    metric: Any = torchmetrics.metric
    gather_on_device: Callable[..., list[torch.Tensor]] = metric.gather_all_tensors

    def gather(result: torch.Tensor, group: Any = None) -> list[torch.Tensor]:
        if in_step() or group is not None:
            return gather_on_device(result, group)
        (host,) = get_runtime().transfers.to_host([result])
        with uploading():
            return [value.to(result.device) for value in ranks.gather(host, "a state of a metric")]

    with (
        replaced(Trainer, "distributed_sampler_kwargs", property(kwargs)),
        replaced(loop, "_broadcast_sigterm_tensor", look_for_signals),
        replaced(signals, "_sigterm_notifier_fn", note_signal),
        replaced(metric, "gather_all_tensors", gather),
    ):
        yield


class RankHooks:
    """The hooks of a strategy with which ranks exchange values; in one process they return what they are given.

    Attributes:
        global_rank, local_rank, world_size: as of Lightning's strategies.
    """

    global_rank: int
    local_rank: int
    world_size: int
    _ranks: DataParallel | None
    _ranks_config: ShardingConfig | None
    lightning_module: Any
    # After an error ranks exchange nothing any more.
    _has_failed = False

    def _take_rank(self) -> None:
        """Sets the attributes, once the ranks have met."""
        if self._ranks is not None:
            ranks = self._ranks.ranks
            self.global_rank, self.world_size = ranks.rank, ranks.size
            self.local_rank = int(os.environ.get("LOCAL_RANK", ranks.rank))

    def _prepare_ranks(self, model: torch.nn.Module) -> None:
        """Has ranks train a model together, which is on the host still.

        Averages of weights (`WeightAveraging`, `StochasticWeightAveraging`) are copies that callbacks made of it
        before: each rank holds the same shards of them.
        """
        assert self._ranks is not None
        self._ranks.prepare(model, self._ranks_config)
        if self._ranks.has_shards(model):
            for callback in self.lightning_module.trainer.callbacks:
                average = getattr(callback, "_average_model", None)
                if isinstance(average, torch.nn.Module):
                    self._ranks.prepare(average, self._ranks_config)

    @property
    def is_global_zero(self) -> bool:
        """Whether this is the rank that writes and logs."""
        return self.global_rank == 0

    @property
    def is_distributed(self) -> bool:
        """Whether each rank gets a part of the data by a sampler of its own."""
        return self._ranks is not None

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        """For `DistributedSampler`."""
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    def barrier(self, name: str | None = None, *args: Any, **kwargs: Any) -> None:
        """As `Strategy.barrier`."""
        if self._ranks is not None:
            self._ranks.ranks.wait(f"the barrier {name!r}")

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """As `Strategy.reduce_boolean_decision`: what all ranks decide, or one of them."""
        if self._ranks is None:
            return decision
        votes = self._ranks.ranks.total(bool(decision), "a decision")
        return votes == self.world_size if all else votes > 0

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """As `Strategy.broadcast`."""
        return obj if self._ranks is None else self._ranks.ranks.gather(obj, "Strategy.broadcast")[src]

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean", *args: Any, **kwargs: Any) -> Any:
        """As `Strategy.reduce`. In a step it is a part of the step's program."""
        if self._ranks is None:
            return tensor
        value = tensor if isinstance(tensor, torch.Tensor) else torch.as_tensor(tensor)
        name = (reduce_op if isinstance(reduce_op, str) else reduce_op.name).lower().removeprefix("redoptype.")
        if in_step() and get_runtime().device.owns(value):
            return reduced_in_step(value, name)
        (host,) = get_runtime().transfers.to_host([value])
        values = torch.stack(self._ranks.ranks.gather(host, f"a reduction ({name}) of {list(host.shape)}"))
        if name in ("mean", "avg"):
            exact = values if host.dtype in (torch.float32, torch.float64) else values.float()
            host = exact.mean(0).to(host.dtype) if host.is_floating_point() else exact.mean(0)
        elif name == "sum":
            host = values.sum(0)
        else:
            host = values.prod(0) if name == "product" else values.amax(0) if name == "max" else values.amin(0)
        return host.to(value.device)

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        """As `Strategy.all_gather`: the tensors of all ranks, stacked. In a step it is a part of the step's program."""
        if self._ranks is None:
            return tensor
        if in_step() and get_runtime().device.owns(tensor):
            return gathered_in_step(tensor, sync_grads)
        (host,) = get_runtime().transfers.to_host([tensor])
        return torch.stack(self._ranks.ranks.gather(host, "Strategy.all_gather")).to(tensor.device)


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


def prepare_for_run(sharding: ModuleSharding, module: LightningModule) -> None:
    """Plans for the module of a run with an example of the run's batches, and shards its parameters.

    Args:
        sharding: of the strategy.
        module: on the device; its Trainer is set.

    Raises:
        ConfigError: no plan satisfies the options.
    """
    trainer = module.trainer
    # A run that saves no checkpoint saves no plan.
    folder = Path(trainer.default_root_dir) if trainer.checkpoint_callbacks else None
    sharding.prepare(module, lambda: example_batch(trainer), folder)


def example_batch(trainer: Trainer) -> Any:
    """A batch on the host with the shapes of the run's batches: copies of the first sample; None for a data stream.

    Takes no batch from the loaders and no random number, so that the run is the same with it and without.
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
    """A batch of one loader, or of several: of all of them if `whole` (training), else of the first (evaluation)."""
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
