"""Attention that stays split under SPMD.

torch_xla 2.9 multiplies batched matrices with batch and heads merged into one dimension, which the partitioner can
split over one axis only: on a mesh of two it gathers queries, keys and values. As an einsum both stay apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """As `torch.nn.functional.scaled_dot_product_attention`, for tensors of 4 dimensions; others go to torch itself."""
    if query.ndim != 4 or key.ndim != 4 or value.ndim != 4 or query.shape[0] != key.shape[0]:
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if enable_gqa:
        key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
        value = value.repeat_interleave(query.shape[1] // value.shape[1], 1)
    dtype = query.dtype
    if dtype in (torch.bfloat16, torch.float16):
        # As torch does where it has no fused kernel.
        query, key, value = query.float(), key.float(), value.float()
    scores = torch.einsum("bhid,bhjd->bhij", query, key) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is None:
        weights = torch.softmax(scores, -1)
    else:
        masks = attn_mask.dtype == torch.bool
        scores = scores.masked_fill(~attn_mask, -math.inf) if masks else scores + attn_mask
        # A query that may look at nothing gets nothing, instead of NaN.
        blind = (scores == -math.inf).all(-1, keepdim=True)
        weights = torch.softmax(scores.masked_fill(blind, 0), -1).masked_fill(blind, 0)
    if dropout_p:
        weights = functional.dropout(weights, dropout_p)
    return torch.einsum("bhij,bhjd->bhid", weights, value).to(dtype)


ATTENTION: dict[Callable[..., Any], Callable[..., torch.Tensor]] = {
    functional.scaled_dot_product_attention: scaled_dot_product_attention,
}
