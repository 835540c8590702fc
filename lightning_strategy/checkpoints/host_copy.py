"""Copies of checkpoints on the host."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection

from xla_adapters import get_runtime
from xla_adapters.utils.nested_values import identity


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
