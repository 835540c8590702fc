"""Copies between host and device: few, and such that they never become another graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from xla_adapters.backend import get_backend
from xla_adapters.modes import eager
from xla_adapters.nested_values import replaced, tensors_in

_SCALAR_UPLOADS: frozenset[Callable[..., Any]] = frozenset(
    {torch.Tensor.to, torch.tensor, torch.as_tensor, torch.scalar_tensor}
)


def upload_scalar(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls a function that may bring one number to the device, and gives the number a buffer of its own.

    torch_xla makes a constant of a scalar 0 or 1 (each value another graph), and lets equal scalars
    share one input, whose buffer is then never reused for an updated value (the first step is
    another graph than the later ones).
    """
    result = function(*args, **kwargs)
    if not isinstance(result, torch.Tensor) or result.ndim != 0 or result.device.type != "xla":
        return result
    source = args[0] if args else kwargs.get("data")
    if isinstance(source, torch.Tensor):
        if source.device.type != "cpu" or (source.requires_grad and torch.is_grad_enabled()):
            return result
        return get_backend().to_device(source.to(result.dtype))
    # Not `requires_grad`: a leaf is what the call made, and stays it.
    return result if result.requires_grad else get_backend().to_device(torch.tensor(source, dtype=result.dtype))


class _ScalarUploads(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _SCALAR_UPLOADS:
            return upload_scalar(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


@contextmanager
def uploading() -> Iterator[None]:
    """For copies from the host to the device.

    In eager mode each would cost an execution. Scalars get buffers of their own (`upload_scalar`).
    """
    with eager(False), get_backend().scalars_as_inputs(), _ScalarUploads():
        yield


def to_host_in_one_transfer(values: Any) -> Any:
    """Copies every device tensor of a nested structure to the host, all in one transfer.

    Args:
        values: tensors in mappings, lists and tuples; anything else is left as it is.
    """
    backend = get_backend()
    on_device = [tensor for tensor in tensors_in(values) if backend.is_backend_tensor(tensor)]
    copies = dict(zip(map(id, on_device), backend.to_host(on_device), strict=True))
    return replaced(values, lambda tensor: copies.get(id(tensor), tensor))
