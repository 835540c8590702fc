"""What must be changed inside transformers, accelerate and torch while our trainer runs, and is undone after.

Each replacement stands for a behaviour without a public hook; `tests/contract` pins what is replaced.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import accelerate.data_loader
import accelerate.utils.operations
import torch
import transformers.trainer_pt_utils

from hf_trainer.experts import experts_of_fixed_shape
from hf_trainer.loader import DeviceLoader
from xla_adapters import get_backend


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


def _own_batch(tensor: torch.Tensor) -> torch.Tensor:
    """What gathering from one process gives: the tensor, with the dimension that gathering adds to scalars."""
    return tensor.clone()[None] if tensor.ndim == 0 else tensor


@contextmanager
def trainer_patches() -> Iterator[None]:
    """The loader, and gathers that stay on the host when there is nobody to gather from.

    Stock, one process: each logged loss is pickled through a rendezvous (10 operations, 7 transfers).
    """
    with _replaced(accelerate.data_loader, "MpDeviceLoaderWrapper", DeviceLoader):
        if get_backend().world_size() > 1:
            yield
            return

        def gather(tensor: Any) -> Any:
            return accelerate.utils.operations.recursively_apply(_own_batch, tensor, error_on_other_type=True)

        def mesh_reduce(tensors: Any, name: str) -> Any:
            return tensors

        with (
            _replaced(accelerate.utils.operations, "_tpu_gather", gather),
            _replaced(transformers.trainer_pt_utils, "nested_xla_mesh_reduce", mesh_reduce),
        ):
            yield


@contextmanager
def as_if_compiling() -> Iterator[None]:
    """Lets models take the path they take under `torch.compile`: the one that reads no tensor.

    In eager PyTorch transformers looks into masks and positions to find a shortcut
    (`masking_utils.find_packed_sequence_indices`, `padding_mask.all()`), one read per forward.
    """
    with _replaced(torch.compiler, "_is_compiling_flag", True), experts_of_fixed_shape():
        yield
