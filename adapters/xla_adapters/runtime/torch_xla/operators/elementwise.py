"""Functions of each value of a tensor that torch_xla has no kernel for."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch

from xla_adapters.runtime.torch_xla.operators.promotions import as_floats

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
    input, other = as_floats(input, other)
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


KERNELS: dict[str, Callable[..., torch.Tensor]] = {
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
}
# For calls from above autograd only.
AUTOGRAD_KERNELS: dict[str, Callable[..., torch.Tensor]] = {"copy": _copy}
