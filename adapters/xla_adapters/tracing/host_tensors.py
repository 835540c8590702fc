"""`host_tensor_error`: says which tensor of a call that failed is on the host, where others are on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from xla_adapters.errors import HostTensorError
from xla_adapters.utils.location import current_location


def host_tensor_error(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], device_type: str
) -> HostTensorError | None:
    """The error of a call whose arguments are on the host and on the device; None if they are not.

    Args:
        function: of torch, which raised.
        args, kwargs: its arguments.
        device_type: of the device, as in `torch.device.type`.
    """
    given = list(_tensors([*enumerate(args, 1), *kwargs.items()], ""))
    on_host = [(name, tensor) for name, tensor in given if tensor.device.type == "cpu"]
    on_device = [tensor for _, tensor in given if tensor.device.type == device_type]
    if not on_host or not on_device:
        return None
    named = ", ".join(f"{name} {_described(tensor)}" for name, tensor in on_host[:3])
    more = f" and {len(on_host) - 3} more" if len(on_host) > 3 else ""
    place = current_location()
    where = "" if place is None else f"\n  where: {place.called_from or place}"
    called = getattr(function, "__name__", str(function))
    return HostTensorError(
        f"{called} got tensors on the host together with tensors on the device: {named}{more}{where}\n"
        f"  what to do: move them with .to({str(on_device[0].device)!r}), or make them there (device=...); the tensors "
        "of a module move with module.to(device) if they are parameters or buffers"
    )


def _tensors(values: list[tuple[Any, Any]], within: str) -> Iterator[tuple[str, torch.Tensor]]:
    for name, value in values:
        called = within or (f"argument {name}" if isinstance(name, int) else str(name))
        if isinstance(value, torch.Tensor):
            yield called, value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(list(enumerate(value, 1)), called)


def _described(tensor: torch.Tensor) -> str:
    return f"({str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)})"
