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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.autograd import Variable
from torch.distributed import _functional_collectives as collectives
from torch.nn.modules.batchnorm import _BatchNorm

from xla_adapters.config import XLAConfig
from xla_adapters.errors import RankError, UnsupportedOptionError
from xla_adapters.open_step import in_step, open_step
from xla_adapters.runtime import get_runtime
from xla_adapters.runtime.ranks import Ranks
from xla_adapters.runtime.transfers import uploading
from xla_adapters.sharding.config import ShardingConfig

_log = logging.getLogger(__name__)
_Hook = TypeVar("_Hook", bound=Callable[..., Any])
# Elements. Smaller gradients travel together; larger ones by themselves, since joining them copies them.
_TOGETHER_BELOW = 1 << 18


def mean_over_ranks(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The means over all ranks of tensors on the device, summed in float32 if they have half its bits.

    Args:
        tensors: of the same shapes and dtypes on each rank, in the same order.
    """
    return _small_ones_together(_mean, tensors)


def of_first_rank(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The values that tensors on the device have on the first rank.

    Gathered, since a broadcast of torch_tpu is another program on the rank that sends.
    """
    return _small_ones_together(lambda tensor: gathered_in_step(tensor, False)[0], tensors)


def _small_ones_together(
    compute: Callable[[torch.Tensor], torch.Tensor], tensors: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    results: list[torch.Tensor | None] = [None] * len(tensors)
    small: dict[torch.dtype, list[int]] = {}
    for index, tensor in enumerate(tensors):
        if tensor.numel() < _TOGETHER_BELOW:
            small.setdefault(tensor.dtype, []).append(index)
        else:
            results[index] = compute(tensor)
    for indices in small.values():
        joined = compute(torch.cat([tensors[index].reshape(-1) for index in indices]))
        parts = joined.split([tensors[index].numel() for index in indices])
        for index, part in zip(indices, parts, strict=True):
            results[index] = part.view(tensors[index].shape)
    return [result for result in results if result is not None]


def reduced_in_step(tensor: torch.Tensor, operation: str) -> torch.Tensor:
    """A tensor on the device, reduced over all ranks.

    Args:
        tensor: of the same shape on each rank.
        operation: `mean` or `avg`, `sum`, `max`, `min` or `product`.
    """
    if operation in ("mean", "avg"):
        return _mean(tensor if tensor.is_floating_point() else tensor.float())
    reduced: torch.Tensor = collectives.all_reduce(tensor, operation, _world()) + 0
    return reduced


def gathered_in_step(tensor: torch.Tensor, with_gradients: bool) -> torch.Tensor:
    """The tensors of all ranks, stacked.

    Args:
        tensor: on the device, of the same shape on each rank.
        with_gradients: whether the gradients that the other ranks compute for it are added to its own.
    """
    gather = collectives.all_gather_tensor_autograd if with_gradients else collectives.all_gather_tensor
    with torch.set_grad_enabled(with_gradients and torch.is_grad_enabled()):
        gathered: torch.Tensor = gather(tensor.unsqueeze(0).contiguous(), 0, _world()) + 0
    return gathered


def _world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def _mean(tensor: torch.Tensor) -> torch.Tensor:
    precise = tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor
    total: torch.Tensor = collectives.all_reduce(precise, "sum", _world())
    return (total / dist.get_world_size()).to(tensor.dtype)


def _only_tensors(hook: _Hook) -> _Hook:
    """Marks a hook whose Python a replay may leave out: it computes with tensors alone."""
    vars(hook)["only_tensors"] = True
    return hook


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
    """Raises if ranks cannot do what options for sharding ask for; says what `"auto"` is.

    Raises:
        UnsupportedOptionError: they ask for another scheme than data parallel training.
    """
    if config == ShardingConfig():
        _log.info("sharding='auto' in several processes is 'dp': each has the whole model, and a part of each batch")
    elif config not in (None, ShardingConfig(scheme="dp")):
        asked = repr(config.scheme) if config == ShardingConfig(scheme=config.scheme) else config
        raise UnsupportedOptionError(
            f"sharding={asked}: several processes with one device each ({get_runtime().name}) train data parallel, "
            "with the whole model on each: use sharding='dp', or shard with torch_xla"
        )


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
        # Whose gradients the present backward has changed, and those before it without an exchange.
        self._touched: list[torch.Tensor] = []
        self._waiting: list[torch.Tensor] = []
        self._is_held = False
        # The backward at whose end gradients will be averaged; one that fails does not come to its end.
        self._queued_for = -1
        # Gradients that are averages, by the `id` of their parameters; until they are updated.
        self._averaged: dict[int, torch.Tensor] = {}
        # The buffers before a step with their versions, and which step. The buffers themselves: a later one can get the
        # `id` of one that is gone.
        self._noted: dict[tuple[int, str], tuple[torch.Tensor, int]] = {}
        self._noted_in: weakref.ref[object] | None = None
        if ranks is not None:
            ranks.before_update = self._before_update

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

    def prepare(self, model: torch.nn.Module) -> None:
        """Has the gradients of a model averaged from now on; can be called again.

        Args:
            model: gets the values that it has on the first rank.
        """
        if model not in self._models:
            self._take_values_of_first([tensor.data for tensor in (*model.parameters(), *model.buffers())])
            self._models[model] = None
            model.register_forward_pre_hook(self._before_forward)
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

    @_only_tensors
    def _before_forward(self, model: torch.nn.Module, args: Any) -> None:
        # Parameters that were frozen when the model was prepared.
        self._hook(model)
        if self._ranks is not None:
            if (None if self._noted_in is None else self._noted_in()) is not open_step.step:
                self._begin_notes()
            self._note_buffers(model)

    def _hook(self, model: torch.nn.Module) -> None:
        for parameter in () if self._ranks is None else model.parameters():
            if parameter.requires_grad and self._hooked.get(id(parameter)) is not parameter:
                self._hooked[id(parameter)] = parameter
                parameter.register_post_accumulate_grad_hook(self._accumulated)

    @_only_tensors
    def _accumulated(self, parameter: torch.Tensor) -> None:
        backward = torch._C._current_graph_task_id()
        if self._queued_for != backward:
            self._queued_for = backward
            self._touched.clear()
            Variable._execution_engine.queue_callback(self._backward_ended)
        self._touched.append(parameter)
        self._averaged.pop(id(parameter), None)

    @_only_tensors
    def _backward_ended(self) -> None:
        self._waiting += self._touched
        self._touched.clear()
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


@functools.cache
def _with(ranks: Ranks | None) -> DataParallel:
    return DataParallel(ranks)
