"""Patches of transformers, accelerate and torch while our trainer runs; undone afterwards.

Each replaces a behaviour that has no public hook. `tests/contract` pins the names that are replaced.
"""

from __future__ import annotations

import functools
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
from transformers import TrainingArguments

from hf_trainer.experts import experts_of_fixed_shape
from hf_trainer.loader import DeviceLoader, skip_first_batches
from hf_trainer.torch_tpu import loader_patches
from xla_adapters import get_runtime
from xla_adapters.utils import torch_modes
from xla_adapters.utils.patching import replaced


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


def _reduced_in_one_process(tensor: Any, reduction: str = "mean", scale: float = 1.0) -> Any:
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
            stack.enter_context(replaced(accelerate.accelerator, "reduce", _reduced_in_one_process))
            stack.enter_context(replaced(accelerate.accelerator, "pad_across_processes", _as_it_is))
            yield


def _with_gather_object() -> list[ModuleType]:
    """The modules that have imported accelerate's function by name."""
    function = accelerate.utils.operations.gather_object
    return [module for module in list(sys.modules.values()) if _vars(module).get("gather_object") is function]


def _vars(module: object) -> dict[str, Any]:
    # Programs may put other objects there.
    return getattr(module, "__dict__", {}) if isinstance(module, ModuleType) else {}


@contextmanager
def no_search_for_gradients(model: Callable[[], torch.nn.Module], are_none: Callable[[], bool]) -> Iterator[None]:
    """The loop's `model.zero_grad()` returns at once if there are no gradients, instead of walking over all modules.

    Args:
        model: returns the model.
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
