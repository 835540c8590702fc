"""`arange` with steps that are no integers, which torch_xla 2.9 adds up.

Its sum may end before the end that torch leaves out: `torch.arange(0, 1, 0.1)` has 11 values there.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch


def _arange_from(
    stock: Callable[..., torch.Tensor], start: float, end: float, *, dtype: torch.dtype | None = None, **options: Any
) -> torch.Tensor:
    """`arange.start`."""
    if float(start).is_integer():
        return stock(start, end, dtype=dtype, **options)
    return _arange(lambda *args, **kwargs: stock(*args[:2], **kwargs), start, end, 1, dtype=dtype, **options)


def _arange(
    stock: Callable[..., torch.Tensor],
    start: float,
    end: float,
    step: float = 1,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    **options: Any,
) -> torch.Tensor:
    """`arange.start_step`: each value by its place."""
    exact = float(start).is_integer() and float(step).is_integer()
    count = 0 if exact or step == 0 or not math.isfinite(end) else math.ceil((end - start) / step)
    if count <= 0:
        return stock(start, end, step, dtype=dtype, device=device, **options)
    dtype = torch.get_default_dtype() if dtype is None else dtype
    computed = torch.float64 if dtype is torch.float64 else torch.float32
    places = torch.arange(count, device=device).to(computed)
    return (places * step + start).to(dtype)


# Their first argument is torch's kernel, which fills what torch_xla allocates.
AROUND_STOCK: dict[str, Callable[..., torch.Tensor]] = {"arange.start": _arange_from, "arange.start_step": _arange}
