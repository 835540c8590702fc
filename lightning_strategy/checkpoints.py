"""Checkpoints of the XLA strategies: host tensors in Lightning's own format, which any Trainer reads."""

from __future__ import annotations

import copy
from typing import Any

import torch
from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning_utilities.core.apply_func import apply_to_collection

from xla_adapters import get_backend

RANDOM_STATE = "xla_adapters"


class XLAEagerCheckpointIO(TorchCheckpointIO):
    """Writes what it is given with `torch.save`; the strategy has brought it to the host before.

    Lightning's own for XLA goes through `xm.save` machinery of torch_xla; nothing here does.
    """


def on_host(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """A copy of a checkpoint with all tensors on the host, in one transfer.

    Tensors that were one on the device (tied weights) are one on the host. Under donation the device's
    buffers are reused by the next step, so a writer that works in the background needs this copy too.
    """
    backend = get_backend()
    found: dict[tuple[object, ...], torch.Tensor] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if backend.is_backend_tensor(tensor):
            found.setdefault(identity(tensor), tensor)
        return tensor

    apply_to_collection(checkpoint, torch.Tensor, note)
    copies = dict(zip(found, backend.to_host(list(found.values())), strict=True))

    def replace(tensor: torch.Tensor) -> torch.Tensor:
        return copies.get(identity(tensor), tensor) if backend.is_backend_tensor(tensor) else tensor

    converted: dict[str, Any] = apply_to_collection(checkpoint, torch.Tensor, replace)
    for name, value in checkpoint.items():
        # The versions of modules, an attribute that the copy of a dict loses.
        if hasattr(value, "_metadata"):
            converted[name] = copy.copy(value)
            converted[name].update({key: replace(item) for key, item in value.items()})
    return converted


def identity(tensor: torch.Tensor) -> tuple[object, ...]:
    """The same for tensors that are one (tied weights)."""
    return (tensor.untyped_storage()._cdata, tensor.storage_offset(), tuple(tensor.shape), tensor.stride())
