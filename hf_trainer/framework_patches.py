"""What must be changed inside transformers, accelerate and torch while our trainer runs, and is undone after.

Each replacement stands for a behaviour without a public hook; `tests/contract` pins what is replaced.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
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

    accelerate looks for the package of an optimizer twice in each step; here once for a run.

    Stock, one process: each logged loss is pickled through a rendezvous (10 operations, 7 transfers).
    """
    with (
        replaced(accelerate.data_loader, "MpDeviceLoaderWrapper", DeviceLoader),
        replaced(transformers.trainer, "skip_first_batches", skip_first_batches),
        replaced(accelerate.optimizer, "is_lomo_available", functools.cache(accelerate.optimizer.is_lomo_available)),
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
def as_if_compiling() -> Iterator[None]:
    """Lets models take the path they take under `torch.compile`: fixed shapes, and no tensor read."""
    with compiling.as_if_compiling(), experts_of_fixed_shape():
        yield
