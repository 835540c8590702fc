"""Copies between host and device: few, such that they never become another graph, and known by their values."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from operator import is_not
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from xla_adapters.runtime import get_runtime
from xla_adapters.utils.nested_values import replaced, tensors_in
from xla_adapters.utils.torch_modes import device_type

_SCALAR_UPLOADS: frozenset[Callable[..., Any]] = frozenset(
    {torch.Tensor.to, torch.tensor, torch.as_tensor, torch.scalar_tensor}
)


def upload_scalar(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls a function that may bring one number to the device, and gives the number a buffer of its own.

    torch_xla makes a constant of a scalar 0 or 1 (each value another graph), and lets equal scalars
    share one input, whose buffer is then never reused for an updated value (the first step is
    another graph than the later ones).
    """
    source = args[0] if args else kwargs.get("data")
    if _is_number_on_host(source) and not kwargs.get("requires_grad"):
        host_args = [_on_host(value) for value in args]
        host_kwargs = {name: _on_host(value) for name, value in kwargs.items()}
        if any(map(is_not, host_args, args)) or any(host_kwargs[name] is not kwargs[name] for name in kwargs):
            # On the host: what the call itself makes on the device would count as a copy of another tensor there.
            return get_runtime().transfers.to_device(function(*host_args, **host_kwargs))
    result = function(*args, **kwargs)
    if not isinstance(result, torch.Tensor) or result.device.type != device_type():
        return result
    if isinstance(source, torch.Tensor) and source.device.type == "cpu":
        note_upload(source, result)
    if result.ndim != 0 or get_runtime().has_placeholders:
        return result
    if isinstance(source, torch.Tensor):
        if source.device.type != "cpu" or (source.requires_grad and torch.is_grad_enabled()):
            return result
        return get_runtime().transfers.to_device(source.to(result.dtype))
    # Not `requires_grad`: a leaf is what the call made, and stays it.
    return (
        result if result.requires_grad else get_runtime().transfers.to_device(torch.tensor(source, dtype=result.dtype))
    )


def _is_number_on_host(source: object) -> bool:
    if type(source) is torch.Tensor:
        records = source.requires_grad and torch.is_grad_enabled()
        return source.ndim == 0 and source.device.type == "cpu" and not records
    return isinstance(source, (bool, int, float))


def _on_host(value: Any) -> Any:
    """The argument, with "cpu" in place of an XLA device."""
    if isinstance(value, (str, torch.device)) and torch.device(value).type == "xla":
        return "cpu"
    return value


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
    tracing = get_runtime().tracing
    was_eager, constants = tracing.eager(), tracing.constant_scalars()
    # Ctrl-C may come between any two lines.
    try:
        tracing.set_eager(False)
        tracing.set_constant_scalars(False)
        with _ScalarUploads():
            yield
    finally:
        tracing.set_constant_scalars(constants)
        tracing.set_eager(was_eager)


def to_host_in_one_transfer(values: Any) -> Any:
    """Copies every device tensor of a nested structure to the host, all in one transfer.

    Args:
        values: tensors in mappings, lists and tuples; anything else is left as it is.
    """
    runtime = get_runtime()
    on_device = [tensor for tensor in tensors_in(values) if runtime.device.owns(tensor)]
    copies = dict(zip(map(id, on_device), runtime.transfers.to_host(on_device), strict=True))
    return replaced(values, lambda tensor: copies.get(id(tensor), tensor))


# ---- what the host knows of tensors that were copied to the device --------------------------------


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
_keeps_floats = False


def keep_floats(*, keeps: bool) -> None:
    """Whether values of batches of floating point numbers are remembered, too: one more copy of each batch."""
    global _keeps_floats
    _keeps_floats = keeps


def note_upload(host: torch.Tensor, device: torch.Tensor, *, of_numbers: bool = False) -> None:
    """A tensor was copied to the device. Those of integers and booleans are remembered, others by `keep_floats`.

    Args:
        host: the original.
        device: the copy.
        of_numbers: whether it was made of Python numbers; these are always remembered.
    """
    is_kept = _keeps_floats or of_numbers if device.dtype.is_floating_point else host.numel() <= LARGEST
    if not is_kept or device.dtype.is_complex or host is device:
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


def is_of_batch(device: torch.Tensor) -> bool:
    """Whether a tensor belongs to the batch of a step."""
    return device in _names


def name_tensors(batch: Any, path: str = "") -> None:
    """Remembers the name of each tensor in a batch, for messages.

    Args:
        batch: tensors in mappings, lists and tuples.
        path: the name of the batch.
    """
    if isinstance(batch, torch.Tensor):
        _names[batch] = path or "the batch"
    elif isinstance(batch, Mapping):
        for key, value in batch.items():
            name_tensors(value, f"{path}.{key}" if path else str(key))
    elif isinstance(batch, (list, tuple)):
        for index, value in enumerate(batch):
            name_tensors(value, f"{path}[{index}]" if path else f"item {index}")
