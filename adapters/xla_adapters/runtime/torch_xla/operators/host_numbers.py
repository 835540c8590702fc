"""Numbers in tensors of no dimensions on the host, which other devices take in arithmetic, and torch_xla 2.9 not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

# torch_xla's kernels that refuse such a number.
_STOCK = (
    *("clamp.Tensor", "clamp_min.Tensor", "clamp_max.Tensor", "lerp.Tensor", "lerp.Scalar", "atan2"),
    *("xlogy.Tensor", "index_fill.int_Tensor", "mse_loss", "smooth_l1_loss"),
)
# By the names of operators, whose kernels are called by `with_host_numbers`.
TAKE_HOST_NUMBERS = frozenset(
    (
        *_STOCK,
        *(
            "where.self",
            "masked_fill.Tensor",
            "floor_divide",
            "fmax",
            "fmin",
            "copysign.Tensor",
            "heaviside",
            "logaddexp",
            "logaddexp2",
        ),
    )
)


def with_host_numbers(kernel: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls a kernel with its arguments on the device.

    Raises:
        RuntimeError: an argument on the host has dimensions; some kernels of torch_xla fail on it at the end of a step.
    """
    given = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
    device = next((tensor.device for tensor in given if tensor.device.type != "cpu"), None)
    if device is None or all(tensor.device.type != "cpu" for tensor in given):
        return kernel(*args, **kwargs)
    if any(tensor.ndim and tensor.device.type == "cpu" for tensor in given):
        raise RuntimeError(f"Expected all tensors to be on the same device, but found {device} and cpu")

    def there(value: Any) -> Any:
        return value.to(device) if isinstance(value, torch.Tensor) else value

    return kernel(*map(there, args), **{name: there(value) for name, value in kwargs.items()})


def _stock(stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return stock(*args, **kwargs)


# Their first argument is torch_xla's kernel.
AROUND_STOCK: dict[str, Callable[..., Any]] = dict.fromkeys(
    ("lerp.Tensor", "lerp.Scalar", "mse_loss", "smooth_l1_loss"), _stock
)
