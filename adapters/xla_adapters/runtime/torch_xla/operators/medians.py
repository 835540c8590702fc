"""Medians, which torch_xla computes on the host, by sorting."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

_Both = tuple[torch.Tensor, torch.Tensor]


def _sorted_last(self: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Along the last dimension: the sorted values, their places, and which values are no numbers."""
    rows = self.movedim(dim, -1) if self.ndim else self.reshape(1)
    values, places = torch.sort(rows, dim=-1, stable=True)
    return values, places, rows.isnan()


def _chosen(self: torch.Tensor, dim: int, keepdim: bool, values: torch.Tensor, places: torch.Tensor) -> _Both:
    if not self.ndim:
        return values.reshape(()), places.reshape(())
    both = (one.movedim(-1, dim) for one in (values, places))
    first, second = both if keepdim else (one.squeeze(dim) for one in both)
    return first.clone(), second.clone()


def _of_nothing(self: torch.Tensor, dim: int, keepdim: bool) -> _Both:
    """No medians, where there are no rows."""
    if not self.shape[dim]:
        raise IndexError(f"a median of no values, along dimension {dim} of shape {tuple(self.shape)}")
    values = self.sum(dim, keepdim)
    return values.to(self.dtype), torch.zeros(values.shape, dtype=torch.int64, device=self.device)


def _median_along(self: torch.Tensor, dim: int, keepdim: bool = False) -> _Both:
    """The lower one of two; NaN where there is one."""
    if not self.numel():
        return _of_nothing(self, dim, keepdim)
    values, places, nans = _sorted_last(self, dim)
    middle = (values.shape[-1] - 1) // 2
    value, place = values.narrow(-1, middle, 1), places.narrow(-1, middle, 1)
    if self.is_floating_point():
        any_nan = nans.any(-1, keepdim=True)
        value = torch.where(any_nan, torch.full_like(value, torch.nan), value)
        place = torch.where(any_nan, nans.long().argmax(-1, keepdim=True), place)
    return _chosen(self, dim, keepdim, value, place)


def _median_of_numbers_along(self: torch.Tensor, dim: int, keepdim: bool = False) -> _Both:
    """Leaves out what is no number, which is sorted to the end."""
    if not self.numel():
        return _of_nothing(self, dim, keepdim)
    values, places, nans = _sorted_last(self, dim)
    middle = ((~nans).sum(-1, keepdim=True) - 1).clamp(min=0) // 2
    return _chosen(self, dim, keepdim, values.gather(-1, middle), places.gather(-1, middle))


def _over_all(median: Callable[[torch.Tensor, int], _Both]) -> Callable[[torch.Tensor], torch.Tensor]:
    """Of all values. The gradient is distributed over those that are equal to the median, as torch does."""

    def kernel(self: torch.Tensor) -> torch.Tensor:
        flat = self.reshape(-1)
        if not flat.numel():
            return torch.full((), torch.nan if self.is_floating_point() else 0, dtype=self.dtype, device=self.device)
        value = median(flat.detach(), 0)[0]
        if not self.requires_grad:
            return value
        equal = (flat == value) | (flat.isnan() & value.isnan())
        spread = torch.where(equal, flat, torch.zeros_like(flat)).sum() / equal.sum()
        # The value itself, without what adding and dividing round.
        return value + (spread - spread.detach()) if spread.requires_grad else value

    return kernel


KERNELS: Mapping[str, Callable[..., _Both]] = {
    "median.dim": _median_along,
    "nanmedian.dim": _median_of_numbers_along,
}
# Written with operators that have a backward.
DIFFERENTIABLE: Mapping[str, Callable[..., torch.Tensor]] = {
    "median": _over_all(_median_along),
    "nanmedian": _over_all(_median_of_numbers_along),
}
