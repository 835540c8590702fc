"""What the host knows of tensors that were copied to the device: the integers of a batch, and their names in it."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

# Larger batches of integers are images.
LARGEST = 1 << 22


class Upload:
    """One tensor that was copied to the device.

    Args:
        host: the original. It is copied, because data loaders may use its memory again.
        device: the copy on the device.
    """

    __slots__ = ("_host", "_version", "values")

    def __init__(self, host: torch.Tensor, device: torch.Tensor) -> None:
        self.values = host.detach().to(device.dtype, copy=True)
        self._host = weakref.ref(host)
        self._version = device._version

    def is_current(self, device: torch.Tensor) -> bool:
        """Whether the tensor on the device still has these values."""
        return device._version == self._version

    def name(self, device: torch.Tensor) -> str | None:
        """Its name in the batch; None if it is in none."""
        host = self._host()
        for tensor in (device, host):
            if tensor is not None and tensor in _names:
                return str(_names[tensor])
        return None


_uploads = WeakTensorKeyDictionary()
_names = WeakTensorKeyDictionary()


def note_upload(host: torch.Tensor, device: torch.Tensor) -> None:
    """A tensor was copied to the device. Only those of integers and booleans are remembered."""
    dtype = device.dtype
    if dtype.is_floating_point or dtype.is_complex or host.numel() > LARGEST or host is device:
        return
    with torch.no_grad(), torch._C.DisableTorchFunction():
        _uploads[device] = Upload(host, device)


def upload_of(device: torch.Tensor) -> Upload | None:
    """What is known of a tensor on the device; None if it was changed there, or did not come from the host."""
    with torch._C.DisableTorchFunction():
        found: Upload | None = _uploads.get(device)
        return found if found is not None and found.is_current(device) else None


def forget_upload(device: torch.Tensor) -> None:
    """A tensor on the device may be changed in a way that cannot be seen."""
    with torch._C.DisableTorchFunction():
        _uploads.pop(device, None)


def name_tensors(batch: Any, path: str = "") -> None:
    """Remembers the name of each tensor of integers in a batch, for messages.

    Args:
        batch: tensors in mappings, lists and tuples.
        path: the name of the batch.
    """
    if isinstance(batch, torch.Tensor):
        if not batch.dtype.is_floating_point:
            _names[batch] = path or "the batch"
    elif isinstance(batch, Mapping):
        for key, value in batch.items():
            name_tensors(value, f"{path}.{key}" if path else str(key))
    elif isinstance(batch, (list, tuple)):
        for index, value in enumerate(batch):
            name_tensors(value, f"{path}[{index}]" if path else f"item {index}")
