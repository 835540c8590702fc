"""Arithmetic with each value of a tensor: comparisons, dtypes, division, functions, activations and their gradients.

What torch_xla 2.9 does otherwise:
- It compares with a Python number in float64, torch in the dtype of the tensor: `x == 0.3` is false for a float32 `x`
  of 0.3, and `x <= 0.1` for a bfloat16 `x` of 0.1.
- Of arguments of several dtypes it takes that of one for the result's, or refuses them.
- It divides integers in float32, which is exact up to 2**24 only, shifts right as a division by a power of two that
  rounds toward zero, and shifts by a tensor to zero.
- It adds the divisor to a remainder and takes the remainder again: what is small beside the divisor is lost, and 8-bit
  integers overflow. It rounds a rounded quotient down: `1.0 // 0.1` is 10 and not 9.
- Activations and their gradients err at the bounds, for infinities and for NaN. The kernels here choose by
  `torch.where` of two whole tensors: under SPMD a `masked_fill`, or a `where` with a single value, has GSPMD cut the
  activations along other dimensions than the batch, and send them.
- It adds up the steps of `arange`, so that the sum may end before the end that torch leaves out:
  `torch.arange(0, 1, 0.1)` has 11 values there.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from functools import partial, reduce
from typing import Any

import torch

from xla_adapters.runtime.torch_xla.operators.registration import Kernels

_Stock = Callable[..., torch.Tensor]
_WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
# Each division in float32 finds 24 bits more of the 63.
_DIVISIONS = 3
# Lanczos' approximation with g = 7 (Numerical Recipes, 3rd edition, section 6.1).
_LANCZOS = (
    *(676.520368121885098567, -1259.139216722402870472, 771.3234287776530788487, -176.6150291621405990658),
    *(12.50734327868690481445, -0.1385710952657201168956, 9.984369578019570859563e-6, 1.505632735149311558338e-7),
)
# Abramowitz and Stegun, 9.8.1 and 9.8.2.
_SMALL_I0 = (1.0, 3.5156229, 3.0899424, 1.2067492, 0.2659732, 0.0360768, 0.0045813)
_LARGE_I0 = (
    *(0.39894228, 0.01328592, 0.00225319, -0.00157565, 0.00916281, -0.02057706, 0.02635537, -0.01647633),
    0.00392377,
)


# ---- comparisons with a number --------------------------------------------------------------------


def _compare(stock: Callable[..., torch.Tensor], self: torch.Tensor, other: float) -> torch.Tensor:
    if self.is_floating_point():
        # In float64 the rounded number compares as in the tensor's dtype.
        with torch._C.DisableTorchFunction():
            other = torch.tensor(other, dtype=self.dtype, device="cpu").item()
    return stock(self, other)


# ---- arguments of several dtypes ------------------------------------------------------------------


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
    return stock(*_as_floats(*args))


def _as_floats(one: torch.Tensor | float, other: torch.Tensor | float) -> list[torch.Tensor]:
    """Both in their common dtype. Either is a tensor, and may be of integers; the other may be a number."""
    dtype = torch.result_type(one, other)
    return _as_tensors(one, other, dtype=dtype if dtype.is_floating_point else torch.get_default_dtype())


def _as_tensors(*values: Any, dtype: torch.dtype | None = None) -> list[torch.Tensor]:
    """Values of which one is a tensor, as tensors of its device.

    torch gives Python numbers to kernels in Python as they are, where those in C++ get tensors.

    Args:
        values: tensors and numbers.
        dtype: of all; None leaves tensors theirs, and gives a number the dtype that it has beside the tensor.
    """
    like = next(value for value in values if isinstance(value, torch.Tensor))
    return [
        (value if dtype is None else value.to(dtype))
        if isinstance(value, torch.Tensor)
        else torch.full((), value, dtype=dtype or torch.result_type(like, value), device=like.device)
        for value in values
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


def _where(
    stock: Callable[..., torch.Tensor], condition: torch.Tensor, self: torch.Tensor, other: torch.Tensor
) -> torch.Tensor:
    """Chooses between whole tensors: of a single value, GSPMD cuts the others not along the batch, and sends them."""
    dtype = torch.result_type(self, other)
    shape = torch.broadcast_shapes(condition.shape, self.shape, other.shape)
    self, other = (tensor if tensor.ndim else tensor.expand(shape) for tensor in (self, other))
    return stock(condition, self.to(dtype), other.to(dtype))


def _masked_fill(self: torch.Tensor, mask: torch.Tensor, value: torch.Tensor | float) -> torch.Tensor:
    """See `_where`."""
    if mask.dtype is not torch.bool:
        raise RuntimeError(f"masked_fill only supports boolean masks, but got mask with dtype {mask.dtype}")
    if isinstance(value, torch.Tensor):
        if value.ndim:
            raise RuntimeError(f"masked_fill takes a 0-dimensional value, but got one of {value.ndim} dimensions")
        return torch.where(mask, value.to(self.dtype).expand_as(self), self)
    return torch.where(mask, torch.full_like(self, value), self)


# ---- division, remainders and shifts --------------------------------------------------------------


def _remainder(self: torch.Tensor | float, other: torch.Tensor | float) -> torch.Tensor:
    """`remainder`, with the sign of the divisor. Either is a tensor."""
    dividend, divisor = _as_tensors(self, other)
    if dividend.dtype is torch.bool or divisor.dtype is torch.bool:
        dtype = torch.result_type(dividend, divisor)
        dividend, divisor = dividend.to(dtype), divisor.to(dtype)
    rest = torch.fmod(dividend, divisor)
    if not rest.dtype.is_signed:
        return rest
    return torch.where((rest != 0) & ((divisor < 0) != (rest < 0)), rest + divisor, rest)


def _rounded_down(dividend: torch.Tensor, divisor: torch.Tensor) -> torch.Tensor:
    """The quotient of floats, rounded down as if it were exact."""
    rest = torch.fmod(dividend, divisor)
    exact = (dividend - rest) / divisor
    exact = torch.where((rest != 0) & ((divisor < 0) != (rest < 0)), exact - 1, exact)
    floor = exact.floor()
    floor = torch.where(exact - floor > 0.5, floor + 1, floor)
    quotient = dividend / divisor
    floor = torch.where(exact == 0, torch.copysign(torch.zeros_like(floor), quotient), floor)
    return torch.where(divisor == 0, quotient, floor)


def _are_whole(*values: Any) -> bool:
    return all(value.dtype in _WHOLE if isinstance(value, torch.Tensor) else type(value) is int for value in values)


def _quotient(dividend: torch.Tensor | int, divisor: torch.Tensor | int, *, floors: bool) -> torch.Tensor:
    """Either is a tensor; a number that Python code gave arrives as one."""
    dtype = torch.result_type(dividend, divisor)
    rest, by = _as_tensors(dividend, divisor, dtype=torch.int64)
    # Divisible from here on, so that rounding to the nearest is exact in the end.
    rest = rest - (torch.remainder(rest, by) if floors else torch.fmod(rest, by))
    quotient = torch.zeros_like(rest)
    for _ in range(_DIVISIONS):
        part = (rest.to(torch.float32) / by.to(torch.float32)).round().to(torch.int64)
        quotient = quotient + part
        rest = rest - part * by
    return quotient.to(dtype)


def _floor_divide(stock: _Stock, dividend: Any, divisor: Any) -> torch.Tensor:
    if _are_whole(dividend, divisor):
        return _quotient(dividend, divisor, floors=True)
    dividend, divisor = _as_tensors(dividend, divisor)
    if torch.result_type(dividend, divisor).is_floating_point:
        return _rounded_down(dividend, divisor)
    return stock(dividend, divisor)


def _divide(stock: _Stock, dividend: Any, divisor: Any, *, rounding_mode: str | None = None) -> torch.Tensor:
    if rounding_mode is not None and _are_whole(dividend, divisor):
        return _quotient(dividend, divisor, floors=rounding_mode == "floor")
    dividend, divisor = _as_tensors(dividend, divisor)
    if rounding_mode == "floor" and torch.result_type(dividend, divisor).is_floating_point:
        return _rounded_down(dividend, divisor)
    return stock(dividend, divisor, rounding_mode=rounding_mode)


def _shifted_right(value: torch.Tensor, places: Any) -> torch.Tensor:
    if not _are_whole(places) and getattr(places, "dtype", type(places)) not in (torch.bool, bool):
        # torch_xla's own ends the process.
        raise TypeError(f"a shift by {places}: only integers can be shifted, by integers")
    return torch.bitwise_right_shift(value, places).to(torch.result_type(value, places))


def _shifted_right_in_place(value: torch.Tensor, places: Any) -> torch.Tensor:
    return value.copy_(torch.bitwise_right_shift(value, places))


# ---- functions of each value ----------------------------------------------------------------------


def _in_full_precision(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    """Decorator: less precise values are computed in float32, as on the CPU, and integers in the default dtype."""

    @functools.wraps(function)
    def kernel(input: torch.Tensor) -> torch.Tensor:
        if not input.is_floating_point():
            return function(input.to(torch.get_default_dtype()))
        return function(input.float()).to(input.dtype) if input.dtype.itemsize < 4 else function(input)

    return kernel


def _fmax(input: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return torch.where((input >= other) | other.isnan(), input, other)


def _fmin(input: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return torch.where((input <= other) | other.isnan(), input, other)


def _heaviside(input: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return torch.where(input == 0, values, (input > 0).to(input.dtype))


@_in_full_precision
def _exp2(input: torch.Tensor) -> torch.Tensor:
    return torch.pow(2.0, input)


@_in_full_precision
def _lgamma(input: torch.Tensor) -> torch.Tensor:
    mirrored = input < 0.5
    # Both branches must be finite, or the backward makes NaN of them.
    z = torch.where(mirrored, -input, input - 1)
    above = _log_gamma_above(z)
    # log(pi / |sin(pi x)|) by the distance to the next integer, which is exact.
    distance = (input.abs() - input.abs().floor()).clamp(0, 1)
    distance = torch.where(distance > 0.5, 1 - distance, distance)
    is_pole = mirrored & (distance == 0)
    sine = torch.sin(math.pi * torch.where(distance == 0, torch.full_like(distance, 0.5), distance))
    result = torch.where(mirrored, math.log(math.pi) - sine.log() - above, above)
    return torch.where(is_pole | input.isinf(), torch.full_like(input, math.inf), result)


def _log_gamma_above(z: torch.Tensor) -> torch.Tensor:
    """log(gamma(z + 1)) for z >= -0.5."""
    series = torch.full_like(z, 0.99999999999980993227684700473478)
    for index, coefficient in enumerate(_LANCZOS, start=1):
        series = series + coefficient / (z + index)
    base = z + 7.5
    # log(base) by log1p is exact for small z.
    logarithm = math.log(7.5) + torch.log1p(z / 7.5)
    return (z + 0.5 - base / logarithm) * logarithm + math.log(2 * math.pi) / 2 + series.log()


@_in_full_precision
def _digamma(input: torch.Tensor) -> torch.Tensor:
    mirrored = input < 0.5
    z = torch.where(mirrored, -input, input - 1)
    series = torch.full_like(z, 0.99999999999980993227684700473478)
    slope = torch.zeros_like(z)
    for index, coefficient in enumerate(_LANCZOS, start=1):
        series = series + coefficient / (z + index)
        slope = slope - coefficient / (z + index).square()
    logarithm = math.log(7.5) + torch.log1p(z / 7.5)
    above = logarithm + slope / series - 7 / (7.5 + z)
    part = input - input.floor()
    is_pole = mirrored & (part == 0) & (input != 0)
    tangent = torch.tan(math.pi * torch.where(part == 0, torch.full_like(part, 0.25), part))
    result = torch.where(mirrored, above - math.pi / tangent, above)
    result = torch.where(is_pole, torch.full_like(input, math.nan), result)
    return torch.where(input == 0, -torch.full_like(input, math.inf).copysign(input), result)


@_in_full_precision
def _i0(input: torch.Tensor) -> torch.Tensor:
    size = input.abs()
    small = _polynomial((size.clamp(max=3.75) / 3.75).square(), _SMALL_I0)
    far = size.clamp(min=3.75)
    large = far.exp() * far.rsqrt() * _polynomial(3.75 / far, _LARGE_I0)
    return torch.where(size < 3.75, small, large)


def _polynomial(x: torch.Tensor, coefficients: tuple[float, ...]) -> torch.Tensor:
    result = torch.full_like(x, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        result = result * x + coefficient
    return result


def _copysign(input: torch.Tensor, other: torch.Tensor | float) -> torch.Tensor:
    input, other = _as_floats(input, other)
    magnitude = input.abs()
    # 1 / -0.0 is how zeros show their sign.
    negative = torch.where(other == 0, other.detach().reciprocal(), other) < 0
    return torch.where(negative, -magnitude, magnitude)


def _isin(
    elements: torch.Tensor, test_elements: torch.Tensor, *, assume_unique: bool = False, invert: bool = False
) -> torch.Tensor:
    # torch_xla takes one of the two from the host; transformers' and TRL's generation relies on it.
    device = next(tensor.device for tensor in (elements, test_elements) if tensor.device.type == "xla")
    found = (elements.to(device).unsqueeze(-1) == test_elements.to(device).reshape(-1)).any(-1)
    return ~found if invert else found


def _round_to(self: torch.Tensor, *, decimals: int) -> torch.Tensor:
    """`round.decimals`, with the factor rounded as on the CPU."""
    factor = float(10 ** abs(decimals))
    return torch.round(self * factor) / factor if decimals >= 0 else torch.round(self / factor) * factor


def _copy(self: torch.Tensor, src: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """`copy`, which leaves `self` as it is. torch_xla's own writes it: it stands for `copy_`, below autograd."""
    return src.to(self).expand(self.shape).clone()


def _celu(self: torch.Tensor, alpha: float = 1.0) -> torch.Tensor:
    """As `torch.celu`. torch_xla's own runs the executable of another `alpha`: its graphs have one hash."""
    result: torch.Tensor = torch.ops.aten.elu(self, alpha, 1.0, 1.0 / alpha)
    return result


def _complex(real: torch.Tensor, imag: torch.Tensor) -> torch.Tensor:
    # Below the level where it is a view there is the copy only.
    result: torch.Tensor = torch.ops.aten.view_as_complex_copy(torch.stack(torch.broadcast_tensors(real, imag), -1))
    return result


def _polar(abs: torch.Tensor, angle: torch.Tensor) -> torch.Tensor:
    return _complex(abs * angle.cos(), abs * angle.sin())


def _hypotenuse(input: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    one, two = input.abs(), other.abs()
    longer, shorter = torch.maximum(one, two), torch.minimum(one, two)
    # Without squares that overflow.
    ratio = shorter / torch.where(longer == 0, torch.ones_like(longer), longer)
    result = longer * (1 + ratio * ratio).sqrt()
    result = torch.where(one.isnan() | two.isnan(), torch.full_like(result, torch.nan), result)
    return torch.where(one.isinf() | two.isinf(), torch.full_like(result, torch.inf), result)


def _sign_bit(input: torch.Tensor) -> torch.Tensor:
    if not input.is_floating_point():
        return input < 0
    return torch.copysign(torch.ones_like(input), input) < 0


def _log_normal_cdf(self: torch.Tensor) -> torch.Tensor:
    """`special_log_ndtr`: by the asymptotic series far below 0, where the probability is not representable."""
    values = self if self.is_floating_point() else self.to(torch.get_default_dtype())
    wide = values.float() if values.dtype.itemsize < 4 else values
    near, low = wide.clamp(min=-8), wide.clamp(max=-8)
    probability = 0.5 * torch.erfc(-near.clamp(max=0) * math.sqrt(0.5))
    above = torch.log1p(-0.5 * torch.erfc(near.clamp(min=0) * math.sqrt(0.5)))
    inverse = low.square().reciprocal()
    series = -inverse * (1 - inverse * (3 - inverse * (15 - inverse * 105)))
    far = -0.5 * low.square() - (-low).log() - 0.5 * math.log(2 * math.pi) + torch.log1p(series)
    result = torch.where(wide < -8, far, torch.where(wide < 0, probability.log(), above))
    return torch.where(wide.isnan(), wide, result).to(values.dtype)


def _clamp(
    stock: Callable[..., torch.Tensor], self: torch.Tensor, min: float | None = None, max: float | None = None
) -> torch.Tensor:
    """torch_xla's own makes a bound of NaN, and the largest number of infinity, and rounds bounds of integers."""
    if not self.is_floating_point():
        for bound in (min, max):
            self = self if bound is None else self.to(torch.result_type(self, bound))
        return stock(self, min, max)
    if any(bound is not None and bound != bound for bound in (min, max)):
        return torch.full_like(self, torch.nan)
    # Not `masked_fill`, as in `activations`.
    result = self if min is None else torch.where(self < min, torch.full_like(self, min), self)
    return result if max is None else torch.where(result > max, torch.full_like(result, max), result)


def _clamp_from_above(stock: Callable[..., torch.Tensor], self: torch.Tensor, max: float) -> torch.Tensor:
    return _clamp(lambda self, min, max: stock(self, max), self, None, max)


def _clamp_from_below(stock: Callable[..., torch.Tensor], self: torch.Tensor, min: float) -> torch.Tensor:
    return _clamp(lambda self, min, max: stock(self, min), self, min)


# ---- activations and losses, and their gradients --------------------------------------------------


def _threshold(self: torch.Tensor, threshold: float, value: float) -> torch.Tensor:
    return torch.where(self <= threshold, torch.full_like(self, value), self)


def _threshold_backward(grad_output: torch.Tensor, self: torch.Tensor, threshold: float) -> torch.Tensor:
    """The gradient of `relu` and `threshold`: passed on for NaN."""
    return torch.where(self <= threshold, torch.zeros_like(grad_output), grad_output)


def _soft_shrink(stock: Callable[..., torch.Tensor], self: torch.Tensor, lambd: float = 0.5) -> torch.Tensor:
    return torch.where(self.isnan(), self, stock(self, lambd))


def _numbers_only(
    stock: Callable[..., torch.Tensor],
    self: torch.Tensor,
    nan: float | None = None,
    posinf: float | None = None,
    neginf: float | None = None,
) -> torch.Tensor:
    """`nan_to_num`: instead of infinity the largest number of the dtype, which is not that of float32."""
    if self.is_floating_point():
        limits = torch.finfo(self.dtype)
        posinf = limits.max if posinf is None else posinf
        neginf = limits.min if neginf is None else neginf
    return stock(self, nan, posinf, neginf)


def _elu_backward(
    grad_output: torch.Tensor,
    alpha: float,
    scale: float,
    input_scale: float,
    is_result: bool,
    self_or_result: torch.Tensor,
) -> torch.Tensor:
    """torch_xla's own is also wrong for numbers where the input is given and not the result."""
    negative = input_scale * alpha * scale
    if is_result:
        slope = input_scale * (self_or_result + alpha * scale)
    else:
        slope = negative * torch.exp((self_or_result * input_scale).clamp(max=0))
    return grad_output * torch.where(self_or_result > 0, torch.full_like(slope, scale), slope)


def _hard_swish_backward(grad_output: torch.Tensor, self: torch.Tensor) -> torch.Tensor:
    slope = torch.where(self >= 3, torch.ones_like(self), self / 3 + 0.5)
    slope = torch.where(self <= -3, torch.zeros_like(self), slope)
    return grad_output * slope


def _hard_tanh_backward(grad_output: torch.Tensor, self: torch.Tensor, min_val: float, max_val: float) -> torch.Tensor:
    """Of `relu6`, too: 0 at the bounds, where torch_xla's own is 1."""
    return torch.where((self > min_val) & (self < max_val), grad_output, torch.zeros_like(grad_output))


def _hard_sigmoid_backward(grad_output: torch.Tensor, self: torch.Tensor) -> torch.Tensor:
    return torch.where((self > -3) & (self < 3), grad_output / 6, torch.zeros_like(grad_output))


def _smooth_l1_backward(
    grad_output: torch.Tensor, self: torch.Tensor, target: torch.Tensor, reduction: int, beta: float
) -> torch.Tensor:
    difference = self - target
    slope = difference / beta if beta else torch.zeros_like(difference)
    slope = torch.where(difference <= -beta, torch.full_like(slope, -1), slope)
    slope = torch.where(difference >= beta, torch.ones_like(slope), slope)
    return grad_output * (slope / slope.numel() if reduction == 1 else slope)


def _slope_by_result(
    slope: Callable[[torch.Tensor], torch.Tensor],
    stock: Callable[..., torch.Tensor],
    grad_output: torch.Tensor,
    output: torch.Tensor,
) -> torch.Tensor:
    """`tanh_backward` and `sigmoid_backward`, also of complex numbers, whose slopes are conjugated."""
    return grad_output * slope(output).conj() if output.is_complex() else stock(grad_output, output)


def _multilabel_margin(self: torch.Tensor, target: torch.Tensor, reduction: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The targets of a row end at the first -1. torch's decomposition compares with those behind it, too."""
    rows, targets = torch.atleast_2d(self), torch.atleast_2d(target)
    classes = rows.shape[1]
    ended = (targets == -1).cumsum(1) > 0
    places = torch.where(ended, 0, targets)
    given = torch.arange(classes, device=rows.device) == torch.where(ended, -1, targets).unsqueeze(-1)
    is_target = given.any(1)
    margins = (1 - rows.gather(1, places).unsqueeze(-1) + rows.unsqueeze(1)).clamp(min=0)
    counted = ~ended.unsqueeze(-1) & ~is_target.unsqueeze(1)
    losses = torch.where(counted, margins, torch.zeros_like(margins)).sum((1, 2)) / classes
    if reduction == 0:
        losses = losses.reshape(()) if self.ndim < 2 else losses
    else:
        losses = losses.mean() if reduction == 1 else losses.sum()
    return losses, is_target.to(self.dtype).reshape(target.shape)


# ---- sequences of numbers -------------------------------------------------------------------------


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


KERNELS = Kernels(
    differentiable={
        "fmax": _fmax,
        "fmin": _fmin,
        "heaviside": _heaviside,
        "exp2": _exp2,
        "lgamma": _lgamma,
        "digamma": _digamma,
        "i0": _i0,
        "copysign.Tensor": _copysign,
        "celu": _celu,
        "round.decimals": _round_to,
        "isin.Tensor_Tensor": _isin,
        "special_log_ndtr": _log_normal_cdf,
        "multilabel_margin_loss_forward": _multilabel_margin,
    },
    above_autograd={
        # For calls from above autograd only.
        "copy": _copy,
    },
    below_autograd={
        **dict.fromkeys(("remainder.Tensor", "remainder.Scalar", "remainder.Scalar_Tensor"), _remainder),
        **{f"__rshift__.{kind}": _shifted_right for kind in ("Tensor", "Scalar")},
        **{f"__irshift__.{kind}": _shifted_right_in_place for kind in ("Tensor", "Scalar")},
        "masked_fill.Scalar": _masked_fill,
        "masked_fill.Tensor": _masked_fill,
        "threshold": _threshold,
        "threshold_backward": _threshold_backward,
        "elu_backward": _elu_backward,
        "hardswish_backward": _hard_swish_backward,
        "hardtanh_backward": _hard_tanh_backward,
        "hardsigmoid_backward": _hard_sigmoid_backward,
        "smooth_l1_loss_backward": _smooth_l1_backward,
        # The tangent of what does not depend on the arguments, in `torch.func.jvp`.
        "_efficientzerotensor": torch.zeros,
        "complex": _complex,
        "polar": _polar,
        "hypot": _hypotenuse,
        "signbit": _sign_bit,
    },
    around_below_autograd={
        # Their first argument is torch_xla's kernel.
        "floor_divide": _floor_divide,
        # Their first argument is torch_xla's kernel.
        "div.Tensor_mode": _divide,
        **dict.fromkeys((f"{name}.Scalar" for name in ("eq", "ne", "lt", "le", "gt", "ge")), _compare),
        "clamp": _clamp,
        "clamp_max": _clamp_from_above,
        "clamp_min": _clamp_from_below,
        "where.self": _where,
        **dict.fromkeys(("maximum", "minimum", "clamp.Tensor", "clamp_min.Tensor", "clamp_max.Tensor"), _in_one_dtype),
        **dict.fromkeys(("atan2", "xlogy.Tensor"), _in_one_floating_dtype),
        **dict.fromkeys((f"bitwise_{name}.Scalar" for name in ("and", "or", "xor")), _bitwise),
        **dict.fromkeys((f"bitwise_{side}_shift.Scalar_Tensor" for side in ("left", "right")), _shifted_number),
        "softshrink": _soft_shrink,
        "nan_to_num": _numbers_only,
        "tanh_backward": partial(_slope_by_result, lambda output: 1 - output * output),
        "sigmoid_backward": partial(_slope_by_result, lambda output: output * (1 - output)),
        # Their first argument is torch's kernel, which fills what torch_xla allocates.
        "arange.start": _arange_from,
        # Their first argument is torch's kernel, which fills what torch_xla allocates.
        "arange.start_step": _arange,
    },
)
