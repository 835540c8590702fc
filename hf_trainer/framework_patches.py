"""What must be changed inside transformers, accelerate and torch while our trainer runs, and is undone after.

Each replacement stands for a behaviour without a public hook; `tests/contract` pins what is replaced.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import accelerate.data_loader
import accelerate.optimizer
import accelerate.utils.operations
import torch
import transformers.trainer
import transformers.trainer_pt_utils

from hf_trainer.experts import experts_of_fixed_shape
from hf_trainer.loader import DeviceLoader, skip_first_batches
from xla_adapters import compiling, get_backend
from xla_adapters.patching import replaced


def _own_batch(tensor: torch.Tensor) -> torch.Tensor:
    """What gathering from one process gives: the tensor, with the dimension that gathering adds to scalars."""
    return tensor.clone()[None] if tensor.ndim == 0 else tensor


@contextmanager
def trainer_patches() -> Iterator[None]:
    """The loader, and gathers that stay on the host when there is nobody to gather from.

    accelerate looks for the package of an optimizer twice in each step, and has torch look for CUDA's library whenever
    an optimizer asks for CUDA, which each does in each step; here once for a run.

    Stock, one process: each logged loss is pickled through a rendezvous (10 operations, 7 transfers).
    """
    with (
        replaced(accelerate.data_loader, "MpDeviceLoaderWrapper", DeviceLoader),
        replaced(transformers.trainer, "skip_first_batches", skip_first_batches),
        replaced(accelerate.optimizer, "is_lomo_available", functools.cache(accelerate.optimizer.is_lomo_available)),
        replaced(torch.cuda, "is_available", functools.cache(torch.cuda.is_available)),
    ):
        if get_backend().world_size() > 1:
            yield
            return

        def gather(tensor: Any) -> Any:
            return accelerate.utils.operations.recursively_apply(_own_batch, tensor, error_on_other_type=True)

        def mesh_reduce(tensors: Any, name: str) -> Any:
            return tensors

        with (
            replaced(accelerate.utils.operations, "_tpu_gather", gather),
            replaced(transformers.trainer_pt_utils, "nested_xla_mesh_reduce", mesh_reduce),
        ):
            yield


@contextmanager
def no_search_for_gradients(model: Callable[[], torch.nn.Module], are_none: Callable[[], bool]) -> Iterator[None]:
    """Lets the loop's `model.zero_grad()`, which walks over all modules, return where there is nothing to do.

    Args:
        model: whose.
        are_none: whether it is known that none of its parameters has a gradient.
    """
    zero_grad = torch.nn.Module.zero_grad

    def zero_grad_if_any(self: torch.nn.Module, set_to_none: bool = True) -> None:
        if not (set_to_none and self is model() and are_none()):
            zero_grad(self, set_to_none)

    with replaced(torch.nn.Module, "zero_grad", zero_grad_if_any):
        yield


@contextmanager
def as_if_compiling() -> Iterator[None]:
    """Lets models take the path they take under `torch.compile`: fixed shapes, and no tensor read."""
    with compiling.as_if_compiling(), experts_of_fixed_shape():
        yield
