"""`DataParallel`: ranks train one model, each on its own part of the batch, and average the gradients in the step.

A rank computes the gradients of its own rows. At the end of a backward they are replaced by their mean over all ranks:
collectives in the step's program. From there on every rank does the same, so that weights and optimizer states stay
equal. Source: torch's DistributedDataParallel (Li et al. 2020), whose semantics these are; it wraps the module, and
sends buckets from hooks while the backward runs, which a compiled program does by itself.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd import Variable
from torch.nn.modules.batchnorm import _BatchNorm

from xla_adapters.config import XLAConfig
from xla_adapters.errors import RankError, UnsupportedOptionError
from xla_adapters.open_step import in_step, open_step
from xla_adapters.runtime import get_runtime
from xla_adapters.runtime.ranks import Ranks
from xla_adapters.runtime.transfers import uploading
from xla_adapters.sharding.collectives import mean_over_ranks, of_first_rank
from xla_adapters.sharding.config import ShardingConfig
from xla_adapters.sharding.plan_report import human_bytes
from xla_adapters.sharding.shard_calls import ShardCalls, is_split
from xla_adapters.sharding.shards import (
    FullySharded,
    SharedStates,
    gathered_on_host,
    mark_shards,
    only_tensors,
    shard_of,
)
from xla_adapters.tracing.optimizers import eager_reason

_log = logging.getLogger(__name__)


def launched_ranks(config: ShardingConfig | None, steps: XLAConfig, shapes: object) -> DataParallel | None:
    """What trains on the ranks that a launcher has started; None if there is one process, or it drives all devices.

    Args:
        config: the options for sharding; None is data parallel training, as a launcher means it.
        steps: the options of the training steps.
        shapes: those of batches' shapes; None is none.

    Raises:
        UnsupportedOptionError: ranks cannot do what the options ask for.
    """
    if get_runtime().device.launched() < 2:
        return None
    check_scheme(config)
    if shapes is not None:
        raise UnsupportedOptionError(
            "shapes= in several processes: all need batches of the same shape in each step, and each would choose for "
            "itself; leave it out, and pad to one length (padding='max_length', or pad_to_multiple_of)"
        )
    if not steps.compiles_step:
        raise UnsupportedOptionError(
            f"xla_mode={steps.xla_mode!r} in several processes: they exchange gradients in compiled steps only; leave "
            "xla_mode out"
        )
    get_runtime().device.initialize(spmd=True)
    return DataParallel.of_process()


def check_scheme(config: ShardingConfig | None) -> None:
    """Raises if ranks cannot do what options for sharding ask for.

    Raises:
        UnsupportedOptionError: they ask for another scheme than `"dp"`, `"fsdp"` or `"auto"`, or for its details.
    """
    if config is None:
        return
    own = ShardingConfig(scheme=config.scheme, memory_budget=config.memory_budget, topology=config.topology)
    if config != own or config.scheme not in ("auto", "dp", "fsdp"):
        asked = repr(config.scheme) if config == own else config
        raise UnsupportedOptionError(
            f"sharding={asked}: several processes with one device each ({get_runtime().name}) have sharding='dp' (the "
            "whole model on each), 'fsdp' (a shard of it on each), and 'auto' (one of them, by the memory of a device: "
            "topology= and memory_budget=), with no other options; or shard with torch_xla"
        )


def _holds_shards(model: torch.nn.Module, config: ShardingConfig | None) -> bool:
    """Whether each rank keeps only a shard of a model. Says what `"auto"` is.

    Averaging gradients sends less than gathering parameters, so that only memory speaks for shards.
    """
    if config is None or config.scheme != "auto":
        return config is not None and config.scheme == "fsdp"
    from xla_adapters.sharding.automatic import memory_of_device, state_bytes

    limit, of = memory_of_device(config)
    state = sum(state_bytes(parameter, 1) for parameter in model.parameters())
    # The other half is for activations.
    shards = 2 * state > limit
    _log.info(
        "sharding='auto' is %r: parameters, gradients and Adam's averages take %s, which is %s than half of %s (%s)",
        "fsdp" if shards else "dp",
        human_bytes(state),
        "more" if shards else "not more",
        human_bytes(limit),
        of,
    )
    return shards


class DataParallel:
    """Averages the gradients of a model over the ranks at the end of each backward. One in a process.

    Averaging a gradient a second time changes nothing, so an accumulation is right, too: it is the mean of an average
    and of what each rank has added to it. `without_exchange` saves that work.

    Buffers that a step has changed get the values of the first rank, as with torch's DistributedDataParallel. So batch
    norm computes with the statistics of a rank's own rows, and its running statistics are those of the first rank's.

    Args:
        ranks: that train together; None if only one process trains.
    """

    def __init__(self, ranks: Ranks | None) -> None:
        self._ranks = ranks
        # In this order on each rank.
        self._models: weakref.WeakKeyDictionary[torch.nn.Module, None] = weakref.WeakKeyDictionary()
        # By `id`: tensors are compared by their values.
        self._hooked: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()
        # Whose gradients each backward under way has changed (a reentrant checkpoint runs one in another), and those
        # before it without an exchange.
        self._touched: dict[int, list[torch.Tensor]] = {}
        self._waiting: list[torch.Tensor] = []
        self._is_held = False
        # Gradients that are averages, by the `id` of their parameters; until they are updated.
        self._averaged: dict[int, torch.Tensor] = {}
        # The buffers before a step with their versions, and which step. The buffers themselves: a later one can get the
        # `id` of one that is gone.
        self._noted: dict[tuple[int, str], tuple[torch.Tensor, int]] = {}
        self._noted_in: weakref.ref[object] | None = None
        self._sharded: weakref.WeakKeyDictionary[torch.nn.Module, FullySharded] = weakref.WeakKeyDictionary()
        self._calls = ShardCalls()
        self._calls.on_write = self._hide
        if ranks is not None:
            ranks.before_update = self._before_update
            self._states = SharedStates(ranks)

    @classmethod
    def of_process(cls) -> DataParallel:
        """That of this process; does nothing where the process is no rank, as for a model that was loaded there."""
        return _with(get_runtime().device.ranks)

    @property
    def ranks(self) -> Ranks:
        """The ranks that train together."""
        assert self._ranks is not None
        return self._ranks

    def __deepcopy__(self, memo: object) -> DataParallel:
        """A copy of a model has the same hooks."""
        return self

    def __reduce__(self) -> Any:
        """In another process models are not averaged yet."""
        return DataParallel.of_process, ()

    def prepare(self, model: torch.nn.Module, config: ShardingConfig | None = None) -> None:
        """Has the gradients of a model averaged from now on; can be called again.

        Args:
            model: gets the values that it has on the first rank.
            config: says whether each rank keeps only a shard of it; looked at in the first call.

        Raises:
            ConfigError: no parameter of the model can be split.
        """
        if model not in self._models:
            mark_shards(model)
            tensors = [*model.parameters(), *model.buffers()]
            # A part of it may have been given before.
            self._take_values_of_first([tensor.data for tensor in tensors if not is_split(tensor)])
            if _holds_shards(model, config):
                self._sharded[model] = FullySharded(model, self.ranks, self._calls)
                self.ranks.around_call = self._calls
            self._models[model] = None
            model.register_forward_pre_hook(self._before_forward)
        if model in self._sharded:
            self._sharded[model].split()
        self._hook(model)
        self._begin_notes()
        for known in self._models:
            self._note_buffers(known)

    def _take_values_of_first(self, tensors: list[torch.Tensor]) -> None:
        with torch.no_grad():
            host = get_runtime().transfers.to_host(tensors)
            if not self.ranks.same_values(host):
                with uploading():
                    for tensor, value in zip(tensors, host, strict=True):
                        tensor.copy_(value)

    def has_shards(self, model: torch.nn.Module) -> bool:
        """Whether this rank keeps only a shard of a model."""
        return model in self._sharded

    def share_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Has the states of an optimizer saved whole, and split when they are loaded. See `SharedStates`."""
        self._states.add(optimizer)

    def join(self, model: torch.nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Moves a model of which ranks have shards to the host of each, whole; `prepare` splits it again.

        Args:
            model: given to `prepare`.
            optimizers: whose states get whole, too.
        """
        if model in self._sharded:
            for optimizer in optimizers:
                self._states.join(optimizer)
            self._sharded[model].join()

    def gradients(self, model: torch.nn.Module) -> dict[str, torch.Tensor]:
        """The gradients of a model by name, averaged over the ranks, whole, and on the host."""
        return {
            name: _mean_on_host(parameter, parameter.grad.detach(), self.ranks)
            for name, parameter in model.named_parameters()
            if parameter.grad is not None
        }

    @contextmanager
    def without_exchange(self, without: bool = True) -> Iterator[None]:
        """In the body gradients stay as a rank has computed them; the next backward outside averages them all.

        Args:
            without: False changes nothing.
        """
        before, self._is_held = self._is_held, self._is_held or without
        try:
            yield
        finally:
            self._is_held = before

    # ---- in a step -------------------------------------------------------------------------------

    @only_tensors
    def _before_forward(self, model: torch.nn.Module, args: Any) -> None:
        # Parameters that were frozen when the model was prepared.
        self._hook(model)
        if self._ranks is not None:
            if (None if self._noted_in is None else self._noted_in()) is not open_step.step:
                self._begin_notes()
            self._note_buffers(model)

    def _hook(self, model: torch.nn.Module) -> None:
        # Not on the host: parameters that have weak references would not be moved, but replaced.
        owns = get_runtime().device.owns
        for parameter in () if self._ranks is None else model.parameters():
            is_known = self._hooked.get(id(parameter)) is parameter
            # `torch.func.functional_call` may have put another tensor in its place.
            if parameter.requires_grad and parameter.is_leaf and owns(parameter) and not is_known:
                self._hooked[id(parameter)] = parameter
                parameter.register_post_accumulate_grad_hook(self._accumulated)

    @only_tensors
    def _accumulated(self, parameter: torch.Tensor) -> None:
        backward = torch._C._current_graph_task_id()
        if backward not in self._touched:
            self._touched[backward] = []
            Variable._execution_engine.queue_callback(functools.partial(self._backward_ended, backward))
        self._touched[backward].append(parameter)
        self._averaged.pop(id(parameter), None)

    def _hide(self) -> None:
        for sharded in list(self._sharded.values()):
            sharded.hide()

    @only_tensors
    def _backward_ended(self, backward: int) -> None:
        touched = self._touched.pop(backward, [])
        if not self._touched:
            self._hide()
        self._waiting += [parameter for parameter in touched if not is_split(parameter)]
        if self._is_held:
            return
        once = {id(parameter): parameter for parameter in self._waiting}
        self._waiting.clear()
        self._average([parameter for parameter in once.values() if parameter.grad is not None])
        buffers = self._changed_buffers()
        with torch.no_grad():
            for buffer, value in zip(buffers, of_first_rank(buffers), strict=True):
                buffer.copy_(value)

    def _average(self, parameters: Sequence[torch.Tensor]) -> None:
        values = [parameter.grad for parameter in parameters if parameter.grad is not None]
        with torch.no_grad():
            for value, mean in zip(values, mean_over_ranks(values), strict=True):
                value.copy_(mean)
        self._averaged.update((id(parameter), parameter.grad) for parameter in parameters if parameter.grad is not None)

    def _before_update(self, optimizer: torch.optim.Optimizer) -> None:
        """Averages gradients that no backward has (they were assigned, or the update is within the backward).

        Raises:
            RankError: some are of parameters that this object does not know.
        """
        updated = [
            parameter
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.grad is not None and get_runtime().device.owns(parameter)
        ]
        if self._sharded:
            self._states.add(optimizer)
            self._states.check(optimizer)
            self._hide()
            if any(map(is_split, updated)) and not open_step.is_replay:
                _check_update_of_shards(optimizer)
            updated = [parameter for parameter in updated if not is_split(parameter)]
        alone = [parameter for parameter in updated if self._hooked.get(id(parameter)) is not parameter]
        if alone:
            shapes = ", ".join(str(list(parameter.shape)) for parameter in alone[:3])
            raise RankError(
                f"{type(optimizer).__name__} is about to update {len(alone)} parameters (of the shapes {shapes}) whose "
                "gradients are those of this rank alone, so that the ranks would go apart. They are in no model that "
                "the trainer trains: give their module to xla_adapters.distribute_module(module, partition_fn='dp')"
            )
        # A replayed step averages in its program, and eager gradients are averaged by their backward.
        if in_step():
            averaged = self._averaged
            self._average([each for each in updated if averaged.get(id(each)) is not each.grad])
        for parameter in updated:
            self._averaged.pop(id(parameter), None)

    def _changed_buffers(self) -> list[torch.Tensor]:
        """The buffers that were changed since they were noted, in the order of the models."""
        noted, self._noted = self._noted, {}
        return [
            buffer
            for model in self._models
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
            and get_runtime().device.owns(buffer)
            # torch_tpu's batch norm leaves the version of its statistics as it is.
            and (_is_training_norm(module) or _is_changed(buffer, noted.get((id(module), name))))
        ]

    def _begin_notes(self) -> None:
        # A backward that has failed did not come to its end.
        self._touched.clear()
        step = open_step.step
        self._noted_in, self._noted = None if step is None else weakref.ref(step), {}

    def _note_buffers(self, model: torch.nn.Module) -> None:
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    self._noted.setdefault((id(module), name), (buffer, buffer._version))


def _is_changed(buffer: torch.Tensor, noted: tuple[torch.Tensor, int] | None) -> bool:
    return noted is not None and (noted[0] is not buffer or noted[1] != buffer._version)


def _is_training_norm(module: torch.nn.Module) -> bool:
    return isinstance(module, _BatchNorm) and module.training and module.track_running_stats


def _check_update_of_shards(optimizer: torch.optim.Optimizer) -> None:
    """Raises if nobody looks at what an update computes with shards: `ShardCalls` does in traced steps."""
    if not in_step():
        raise UnsupportedOptionError(
            f"{type(optimizer).__name__} updates shards of parameters outside of a step (sharding='fsdp'), where norms "
            "for clipping and the like would be those of this rank's shards: update in a step "
            "(xla_adapters.CompiledStep, xla_adapters.step())"
        )
    reason = eager_reason(optimizer)
    if reason is not None:
        raise UnsupportedOptionError(
            f"{type(optimizer).__name__} updates shards of parameters operation by operation ({reason}), and would "
            "compute with them as if they were whole: use another optimizer, or sharding='dp'"
        )


def share_state(optimizer: torch.optim.Optimizer) -> None:
    """Has `state_dict()` of an optimizer give whole states where ranks hold shards, and `load_state_dict` take shards.

    An optimizer that has stepped, and those of trainers, do so already. In one process nothing changes.

    Args:
        optimizer: of a model that `distribute_module` returned.
    """
    if get_runtime().device.ranks is not None:
        DataParallel.of_process().share_state(optimizer)


def _mean_on_host(parameter: torch.Tensor, gradient: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    if (shard := shard_of(parameter)) is not None:
        return gathered_on_host(gradient, shard, ranks)
    (host,) = get_runtime().transfers.to_host([gradient])
    return torch.stack(ranks.gather_tensor(host, "gradients", to_all=True)).mean(0)


@functools.cache
def _with(ranks: Ranks | None) -> DataParallel:
    return DataParallel(ranks)
