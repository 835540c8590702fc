"""Activations and their gradients, where torch_xla 2.9 errs at the bounds, for infinities and for NaN.

They choose by `torch.where` of two whole tensors. Under SPMD a `masked_fill` has GSPMD cut the activations along other
dimensions than the batch, and send them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch


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


def _log_sum_exp(self: torch.Tensor, dim: list[int], keepdim: bool = False) -> torch.Tensor:
    """`logsumexp`, also of infinities."""
    whole = not (self.is_floating_point() or self.is_complex())
    values = self.to(torch.get_default_dtype()) if whole else self
    if not self.ndim:
        return values.clone()
    dims = list(dim) or list(range(self.ndim))
    if any(self.shape[one] == 0 for one in dims):
        return values.exp().sum(dims, keepdim).log()
    largest = (torch.view_as_real_copy(values).select(-1, 0) if self.is_complex() else values).amax(dims, keepdim=True)
    largest = torch.where(largest.abs() == math.inf, torch.zeros_like(largest), largest)
    total = (values - largest).exp().sum(dims, keepdim).log()
    return total + (largest if keepdim else largest.reshape(total.shape))


KERNELS: dict[str, Callable[..., torch.Tensor]] = {
    "threshold": _threshold,
    "threshold_backward": _threshold_backward,
    "elu_backward": _elu_backward,
    "hardswish_backward": _hard_swish_backward,
    "hardtanh_backward": _hard_tanh_backward,
    "hardsigmoid_backward": _hard_sigmoid_backward,
    "smooth_l1_loss_backward": _smooth_l1_backward,
    "logsumexp": _log_sum_exp,
}
# Their first argument is torch_xla's kernel.
AROUND_STOCK: dict[str, Callable[..., torch.Tensor]] = {
    "softshrink": _soft_shrink,
    "nan_to_num": _numbers_only,
    "tanh_backward": partial(_slope_by_result, lambda output: 1 - output * output),
    "sigmoid_backward": partial(_slope_by_result, lambda output: output * (1 - output)),
}
