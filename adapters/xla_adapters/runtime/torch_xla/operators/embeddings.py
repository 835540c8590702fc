"""Embeddings with `max_norm=` and `sparse=`, for which torch_xla has no kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from xla_adapters.runtime.dense_gradients import warn_of_dense_gradients


def _renorm(self: torch.Tensor, indices: torch.Tensor, max_norm: float, norm_type: float) -> torch.Tensor:
    """`embedding_renorm_`: shortens the rows that are looked up, in place."""
    with torch.no_grad():
        positions = indices.reshape(-1)
        rows = self.index_select(0, positions)
        lengths = torch.linalg.vector_norm(rows, norm_type, 1, keepdim=True)
        # A row that is looked up twice is written twice, with the same values.
        self.index_copy_(0, positions, torch.where(lengths > max_norm, rows * (max_norm / (lengths + 1e-7)), rows))
    return self


def _sparse_backward(
    grad: torch.Tensor, indices: torch.Tensor, num_weights: int, padding_idx: int, scale_grad_by_freq: bool
) -> torch.Tensor:
    """`embedding_sparse_backward`: XLA has no sparse tensors."""
    warn_of_dense_gradients()
    gradient: torch.Tensor = torch.ops.aten.embedding_dense_backward(
        grad, indices, num_weights, padding_idx, scale_grad_by_freq
    )
    return gradient


# The first writes in place, which only autograd's kernels may: below them tensors have no memory of their own.
KERNELS: dict[str, Callable[..., Any]] = {"embedding_renorm_": _renorm, "embedding_sparse_backward": _sparse_backward}
