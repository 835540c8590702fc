"""Matrix products of consecutive groups of rows, each with a matrix of its own, as mixtures of experts compute them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def _grouped(
    input: torch.Tensor,
    mat2: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """As `torch._grouped_mm`. How many rows a group has is known on the device only."""
    if offs is None or input.ndim != 2 or mat2.ndim != 3:
        result: torch.Tensor = torch._grouped_mm(input, mat2, offs=offs, bias=bias, out_dtype=out_dtype)
        return result
    result = _product(input, mat2, offs)
    result = result if bias is None else result + bias
    return result if out_dtype is None else result.to(out_dtype)


def _product(input: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """Every matrix is multiplied with every row, since the shapes of a graph are fixed.

    Args:
        input: (rows, in).
        weight: (groups, in, out).
        offs: (groups,), where each group ends. Rows behind the last one give zeros.
    """
    groups, rows = weight.shape[0], input.shape[0]
    group = torch.searchsorted(offs, torch.arange(rows, device=input.device, dtype=offs.dtype), right=True)
    in_group = group == torch.arange(groups, device=input.device).unsqueeze(-1)
    products = torch.bmm(input.expand(groups, *input.shape), weight)
    return torch.where(in_group.unsqueeze(-1), products, torch.zeros_like(products)).sum(0)


def grouped_products() -> dict[Callable[..., Any], Callable[..., torch.Tensor]]:
    """Lowerings of torch's operator, and of the one that transformers registers when it is imported."""
    found: dict[Callable[..., Any], Callable[..., torch.Tensor]] = {torch._grouped_mm: _grouped}
    registered = getattr(torch.ops.transformers, "grouped_mm_fallback", None)
    return found if registered is None else {**found, registered: _product}
