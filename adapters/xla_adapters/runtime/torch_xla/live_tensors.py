"""`live_tensors`: all tensors on the device that Python can reach."""

from __future__ import annotations

import gc
from itertools import compress

import torch


def live_tensors() -> list[torch.Tensor]:
    """Every tensor on an XLA device that Python code can reach.

    Not those that wrap others, or have no value at all: dynamo keeps the fake tensors of what it compiled.
    """
    objects = gc.get_objects()
    # There may be millions: a look at each one's type, and no Python for those that are no tensors.
    kinds = {kind for kind in set(map(type, objects)) if issubclass(kind, torch.Tensor) and not _has_no_value(kind)}
    tensors: list[torch.Tensor] = list(compress(objects, map(kinds.__contains__, map(type, objects))))
    with torch._C.DisableTorchFunction():
        tensors = [tensor for tensor in tensors if _is_on_device(tensor)]
    return [tensor for tensor in tensors if _owned(tensor)]


def _owned(tensor: torch.Tensor) -> bool:
    """Whether it will live on. Others are being destroyed by other threads: with an owner they would be freed twice."""
    if not tensor._use_count():  # type: ignore[attr-defined]
        return False
    # Of a tensor that only C++ holds, this is the object that it will be seen as again: it must be owned.
    tensor._fix_weakref()  # type: ignore[attr-defined]
    return True


def _has_no_value(kind: type[torch.Tensor]) -> bool:
    return kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__


def _is_on_device(tensor: torch.Tensor) -> bool:
    try:
        return tensor.device.type == "xla"
    except RuntimeError as error:
        # An undefined tensor: what the garbage collector finds of one that is being taken apart.
        if "does not have a device" not in str(error):
            raise
        return False
