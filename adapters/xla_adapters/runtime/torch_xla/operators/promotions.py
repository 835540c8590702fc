"""Arguments of several dtypes, of which torch_xla 2.9 takes that of one for the result's, or which it refuses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import torch

_Stock = Callable[..., torch.Tensor]


def _in_one_dtype(stock: _Stock, *args: Any) -> torch.Tensor:
    """`maximum`, `clamp.Tensor` and the like; bounds that are not given are None."""
    given = [value for value in args if value is not None]
    dtype = reduce(torch.promote_types, {value.dtype for value in given})
    if any(value.dtype is not dtype for value in given):
        dtype = _result_type(given)
        args = tuple(value if value is None else value.to(dtype) for value in args)
    return stock(*args)


def _in_one_floating_dtype(stock: _Stock, *args: Any) -> torch.Tensor:
    """`atan2` and `xlogy`."""
    return stock(*as_floats(*args))


def as_floats(one: torch.Tensor | float, other: torch.Tensor | float) -> list[torch.Tensor]:
    """Both in their common dtype. Either is a tensor, and may be of integers; the other may be a number."""
    dtype = torch.result_type(one, other)
    dtype = dtype if dtype.is_floating_point else torch.get_default_dtype()
    like = one if isinstance(one, torch.Tensor) else other
    assert isinstance(like, torch.Tensor)
    return [
        value.to(dtype) if isinstance(value, torch.Tensor) else torch.full((), value, dtype=dtype, device=like.device)
        for value in (one, other)
    ]


def _result_type(tensors: list[torch.Tensor]) -> torch.dtype:
    """torch's: tensors without dimensions count only where they are of a higher kind."""
    if len(tensors) < 3:
        return torch.result_type(tensors[0], tensors[-1])
    total = tensors[0]
    for other in tensors[1:]:
        shape = (1,) * max(total.ndim, other.ndim)
        total = torch.empty(shape, dtype=torch.result_type(total, other), device="meta")
    return total.dtype


def _bitwise(stock: _Stock, self: torch.Tensor, other: int | bool) -> torch.Tensor:
    """`bitwise_and.Scalar` and the like: truth values with a number are integers."""
    if self.dtype is torch.bool and not isinstance(other, bool):
        self = self.to(torch.int64)
    return stock(self, other)


def _shifted_number(stock: _Stock, self: int, other: torch.Tensor) -> torch.Tensor:
    """`bitwise_left_shift.Scalar_Tensor` and the like."""
    return stock(self, other).to(torch.result_type(self, other))


def _norm(stock: Callable[..., Sequence[torch.Tensor]], input: torch.Tensor, *args: Any) -> Sequence[torch.Tensor]:
    """`native_layer_norm` and the like with weights of a wider dtype: computed in it, and rounded to the input's."""
    weights = (value.dtype for value in args if isinstance(value, torch.Tensor))
    wide = reduce(torch.promote_types, weights, input.dtype)
    if wide is input.dtype:
        return stock(input, *args)
    result, *statistics = stock(input.to(wide), *args)
    return result.to(input.dtype), *statistics


# Their first argument is torch_xla's kernel.
AROUND_STOCK: dict[str, Callable[..., torch.Tensor]] = {
    **dict.fromkeys(("maximum", "minimum", "clamp.Tensor", "clamp_min.Tensor", "clamp_max.Tensor"), _in_one_dtype),
    **dict.fromkeys(("atan2", "xlogy.Tensor"), _in_one_floating_dtype),
    **dict.fromkeys((f"bitwise_{name}.Scalar" for name in ("and", "or", "xor")), _bitwise),
    **dict.fromkeys((f"bitwise_{side}_shift.Scalar_Tensor" for side in ("left", "right")), _shifted_number),
}
# The same, with operators that have a backward.
AROUND_DIFFERENTIABLE = dict.fromkeys(("native_layer_norm", "native_group_norm"), _norm)
