"""Patches of transformers, accelerate and torch while our trainer runs; undone afterwards.

Each replaces a behaviour that has no public hook. `tests/contract` pins the names that are replaced.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any

import accelerate.accelerator
import accelerate.data_loader
import accelerate.optimizer
import accelerate.utils.operations
import torch
import transformers.trainer
import transformers.trainer_pt_utils
from accelerate import DistributedType, PartialState
from accelerate.state import AcceleratorState
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from transformers import Trainer, TrainingArguments
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from hf_trainer.data import DeviceLoader, skip_first_batches
from xla_adapters import get_runtime
from xla_adapters.utils import torch_modes
from xla_adapters.utils.patching import replaced, replaced_item
from xla_adapters.utils.torch_modes import function_called, is_of_torch

# The default of transformers. It sorts the tokens by expert and multiplies groups whose sizes depend on the routing.
# XLA has neither the histogram nor the grouped product.
_DEFAULT = "grouped_mm"


def dense_experts_forward(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Every expert computes every token; the output is the sum weighted by the routing weights, most of which are zero.

    It does more arithmetic than needed, by a factor of experts / experts per token. In exchange it is one graph of
    plain matrix products. `experts_implementation="batched_mm"` also has fixed shapes; it copies the weights of the
    chosen experts for each token.

    Args:
        self: the experts' module, as transformers' own implementations take it.
        hidden_states: (tokens, width).
        top_k_index: (tokens, experts per token), the chosen experts; an id beyond the last expert chooses none.
        top_k_weights: (tokens, experts per token), their weights.

    Returns:
        (tokens, width).
    """
    experts = self.num_experts
    chosen = torch.nn.functional.one_hot(top_k_index.clamp(max=experts), experts + 1)[..., :experts]
    # (tokens, experts). A sum of products, so that the router gets gradients through the chosen weights only.
    routing = (chosen.to(top_k_weights.dtype) * top_k_weights.unsqueeze(-1)).sum(dim=1)
    tokens = hidden_states.expand(experts, *hidden_states.shape)
    if self.has_gate:
        inner = self._apply_gate(_linear(self, tokens, "gate_up_proj"))
    else:
        inner = self.act_fn(_linear(self, tokens, "up_proj"))
    outer = _linear(self, inner, "down_proj")
    if self.has_post_expert_norm:
        outer = self.post_expert_norm(outer)
    result = (outer * routing.t().unsqueeze(-1).to(outer.dtype)).sum(dim=0)
    return result.to(hidden_states.dtype)


def _linear(experts: Any, inputs: torch.Tensor, name: str) -> torch.Tensor:
    """One product per expert: (experts, tokens, in) -> (experts, tokens, out)."""
    weight = getattr(experts, name)
    output = torch.bmm(inputs, weight if experts.is_transposed else weight.transpose(-2, -1))
    return output + getattr(experts, f"{name}_bias").unsqueeze(1) if experts.has_bias else output


@contextmanager
def experts_of_fixed_shape() -> Iterator[None]:
    """Replaces transformers' default implementation by `dense_experts_forward`, in its own registry."""
    with replaced_item(ALL_EXPERTS_FUNCTIONS._local_mapping, _DEFAULT, dense_experts_forward):
        yield


_log = logging.getLogger(__name__)


def torch_tpu_is_used() -> bool:
    """Whether the device is one of TorchTPU."""
    return get_runtime().name == "torch_tpu"


def give_device_to_accelerate(args: TrainingArguments) -> None:
    """Tells accelerate which device it is. accelerate (1.15) does not know TorchTPU, and takes the CPU.

    Called before the trainer makes its `Accelerator`. Said once in a process.

    Args:
        args: of the trainer; `args.device` is right, since transformers knows TorchTPU.

    Raises:
        UnsupportedOptionError: several processes were launched.
    """
    if not torch_tpu_is_used():
        return
    # Raises if several processes were launched: of those, accelerate knows none.
    get_runtime().device.initialize()
    if args.distributed_state is None:
        return
    # Not that of the arguments: of arguments from another process it is a copy.
    state = PartialState()
    _tell_ranks()
    if state.device == args.device:
        return
    _say(state.device, args.device)
    state.device = args.device


def _tell_ranks() -> None:
    ranks = get_runtime().device.ranks
    if ranks is None:
        return
    # The kind whose values accelerate exchanges by gloo.
    kind = {"distributed_type": DistributedType.MULTI_CPU, "backend": "gloo", "num_processes": ranks.size}
    index = {"process_index": ranks.rank, "local_process_index": int(os.environ.get("LOCAL_RANK", ranks.rank))}
    for shared in (PartialState._shared_state, AcceleratorState._shared_state):
        if shared:
            shared.update(kind, **index)


def tell_accelerate_of_ranks() -> None:
    """Has accelerate know the ranks of TorchTPU as soon as it is asked: when `TrainingArguments` are made.

    For the rest of the process. Scripts ask for the index of the process, and let the
    first one prepare the data (`main_process_first`), before there is a trainer.
    """
    if not torch_tpu_is_used():
        return
    stock = PartialState.__init__

    @functools.wraps(stock)
    def __init__(self: Any, cpu: bool = False, **kwargs: Any) -> None:
        is_new = not PartialState._shared_state
        stock(self, cpu, **kwargs)
        device = get_runtime().device
        if is_new and not cpu and device.launched() > 1:
            device.initialize(spmd=True)
            self.device = device.torch_device()
            _tell_ranks()

    PartialState.__init__ = __init__


@functools.cache
def _say(chosen: torch.device, device: torch.device) -> None:
    _log.warning("accelerate took the device %s; a trainer of TorchTPU gives it %s", chosen, device)


@contextmanager
def loader_patches() -> Iterator[None]:
    """`DeviceLoader` reads the batches of all loaders that accelerate prepares, as it does with torch_xla.

    accelerate's own loader would copy batches to the device one by one, and does not know its position.
    """
    if not torch_tpu_is_used():
        yield
        return
    prepare = accelerate.accelerator.prepare_data_loader

    def prepare_data_loader(dataloader: Any, device: Any = None, *args: Any, **kwargs: Any) -> Any:
        loader = prepare(dataloader, None, *args, **{**kwargs, "put_on_device": False})
        return DeviceLoader(loader, device)

    with replaced(accelerate.accelerator, "prepare_data_loader", prepare_data_loader):
        yield


@contextmanager
def losses_not_filtered(trainer: Trainer) -> Iterator[None]:
    """The loop does not read each loss to look for NaN, which that of transformers never does with torch_xla.

    Args:
        trainer: `logging_nan_inf_filter` of its arguments is False inside the context, with TorchTPU, and if it is one
            of sentence-transformers, which reads each part of the loss.
    """
    with ExitStack() as stack:
        if torch_tpu_is_used() or hasattr(trainer, "track_loss_components"):
            stack.enter_context(replaced(trainer.args, "logging_nan_inf_filter", False))
        yield


def correct_process_index(args: TrainingArguments) -> None:
    """Gives the only process the index 0 on its host, without which transformers prints and logs nothing.

    accelerate (1.15) asks torch_xla for it on TPUs only. Elsewhere it reads an environment variable that a launcher
    sets, and takes -1 without one.

    Args:
        args: their state is that of the process. Other arguments that are made later set it back.
    """
    state = args.distributed_state
    if state is not None and args.world_size == 1 and state.local_process_index == -1:
        state.local_process_index = 0


def _as_it_is(tensor: Any, *args: Any, **kwargs: Any) -> Any:
    """As `accelerate.utils.pad_across_processes`, which sends shapes to the device and back to compare them."""
    return tensor


def reduced_in_one_process(tensor: Any, reduction: str = "mean", scale: float = 1.0) -> Any:
    """As `accelerate.utils.reduce`, which syncs the device twice."""
    return accelerate.utils.operations.recursively_apply(
        lambda own: own * scale if scale != 1.0 else own.clone(), tensor, error_on_other_type=True
    )


@contextmanager
def trainer_patches() -> Iterator[None]:
    """Patches for a run of a trainer.

    - Batches are read by `DeviceLoader`.
    - In one process, gathers return their argument. Unpatched, each logged loss is pickled through a rendezvous
      (10 operations, 7 transfers), and objects that are no tensors are refused. Reductions return a copy. Nothing is
      padded to the shapes of other processes.
    - See `numbers_of_ranks`.
    - `is_lomo_available` and `torch.cuda.is_available` are looked up once per run. Unpatched, optimizers search for
      the package and for CUDA's library in each step.
    """
    with (
        replaced(accelerate.data_loader, "MpDeviceLoaderWrapper", DeviceLoader),
        loader_patches(),
        replaced(transformers.trainer, "skip_first_batches", skip_first_batches),
        replaced(accelerate.optimizer, "is_lomo_available", functools.cache(accelerate.optimizer.is_lomo_available)),
        replaced(torch.cuda, "is_available", functools.cache(torch.cuda.is_available)),
    ):
        if get_runtime().device.world_size() > 1:
            with numbers_of_ranks():
                yield
            return

        def gather(tensors: Any) -> Any:
            return tensors

        def mesh_reduce(tensors: Any, name: str) -> Any:
            return tensors

        with ExitStack() as stack:
            stack.enter_context(replaced(accelerate.utils.operations, "_tpu_gather", gather))
            stack.enter_context(replaced(transformers.trainer_pt_utils, "nested_xla_mesh_reduce", mesh_reduce))
            for module in _with_gather_object():
                stack.enter_context(replaced(module, "gather_object", gather))
            stack.enter_context(replaced(accelerate.accelerator, "reduce", reduced_in_one_process))
            stack.enter_context(replaced(accelerate.accelerator, "pad_across_processes", _as_it_is))
            yield


class _ScalesByUse(TorchFunctionMode):
    """Leaves out the factor by which transformers multiplies a rank's loss if the loss is no part of a common mean.

    `Trainer.compute_loss` multiplies by the number of processes what a model has divided by the number of items of all
    processes. It takes that for granted of each model that takes keyword arguments. The losses of many (BERT, T5) are
    means over their own rows instead: with N processes of transformers' own trainer (5.23) their losses and gradients
    are N times too large.

    Args:
        items: the number of items; None if the loss is one of an evaluation, which is compared with no other rank's.
    """

    def __init__(self, items: Any) -> None:
        super().__init__()
        self._items = items
        self._are_used = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._items is not None and any(value is self._items for value in tree_leaves((args, kwargs))):
            self._are_used = True
        # `loss *= ...`
        is_theirs = sys._getframe(1).f_code is transformers.Trainer.compute_loss.__code__
        if func is torch.Tensor.mul_ and is_theirs and not self._are_used:
            return args[0]
        return (func if is_of_torch(func) else function_called(func))(*args, **(kwargs or {}))


@contextmanager
def losses_of_ranks(trainer: Trainer, *, trains: bool) -> Iterator[None]:
    """Inside the context `trainer.compute_loss` scales its loss as the mean over the rows of all ranks needs it.

    Args:
        trainer: with all overrides of the user's class.
        trains: whether the loss is differentiated.
    """
    if get_runtime().device.ranks is None:
        yield
        return
    method = trainer.compute_loss

    @functools.wraps(method)
    def compute_loss(*args: Any, **kwargs: Any) -> Any:
        items = args[3] if len(args) > 3 else kwargs.get("num_items_in_batch")
        if trains and not isinstance(items, torch.Tensor):
            # Nothing tells whether a plain number is used.
            return method(*args, **kwargs)
        with _ScalesByUse(items if trains else None):
            return method(*args, **kwargs)

    with replaced(trainer, "compute_loss", compute_loss):
        yield


@contextmanager
def numbers_of_ranks() -> Iterator[None]:
    """Ranks exchange the loss to log, and their floating point operations, with their own messages.

    transformers would do the latter on the device, and neither would hear of a rank that has failed.
    """
    ranks = get_runtime().device.ranks
    if ranks is None:
        yield
        return

    def gather_loss(loss: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.tensor(ranks.total(float(loss), "the loss to log") / ranks.size)

    def gather_operations(scalars: list[int], *args: Any, **kwargs: Any) -> torch.Tensor:
        done = ranks.total(sum(scalars), "floating point operations, at a log, a save or the end of the training")
        return torch.tensor(int(done))

    with (
        replaced(transformers.trainer, "nested_gather", gather_loss),
        replaced(transformers.trainer, "distributed_broadcast_scalars", gather_operations),
    ):
        yield


def _with_gather_object() -> list[ModuleType]:
    """The modules that have imported accelerate's function by name."""
    function = accelerate.utils.operations.gather_object
    return [module for module in list(sys.modules.values()) if _vars(module).get("gather_object") is function]


def _vars(module: object) -> dict[str, Any]:
    # Programs may put other objects there.
    return getattr(module, "__dict__", {}) if isinstance(module, ModuleType) else {}


@contextmanager
def no_search_for_gradients(model: Callable[[], object], are_none: Callable[[], bool]) -> Iterator[None]:
    """The loop's `model.zero_grad()` returns at once if there are no gradients, instead of walking over all modules.

    Args:
        model: returns the model, if there is one.
        are_none: returns whether it is known that no parameter has a gradient.
    """
    zero_grad = torch.nn.Module.zero_grad

    def zero_grad_if_any(self: torch.nn.Module, set_to_none: bool = True) -> None:
        if not (set_to_none and self is model() and are_none()):
            zero_grad(self, set_to_none)

    with replaced(torch.nn.Module, "zero_grad", zero_grad_if_any):
        yield


@contextmanager
def as_if_compiling() -> Iterator[None]:
    """Models take the path that they take under `torch.compile`: fixed shapes, no tensor reads."""
    with torch_modes.as_if_compiling(), experts_of_fixed_shape():
        yield
