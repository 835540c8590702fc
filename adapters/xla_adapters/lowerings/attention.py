"""Attention that stays sharded under SPMD.

torch_xla 2.9 merges batch and heads into one dimension for batched matrix products. The partitioner can split that
over one mesh axis only, so on a mesh of two axes it gathers queries, keys and values. An einsum keeps the two apart.
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
    """As torch's function of this name, for tensors of 4 dimensions; others are passed on to torch."""
    if query.ndim != 4 or key.ndim != 4 or value.ndim != 4 or query.shape[0] != key.shape[0]:
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if enable_gqa:
        key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
        value = value.repeat_interleave(query.shape[1] // value.shape[1], 1)
    dtype = query.dtype
    if dtype in (torch.bfloat16, torch.float16):
        # As torch computes it without a fused kernel.
        query, key, value = query.float(), key.float(), value.float()
    scores = torch.einsum("bhid,bhjd->bhij", query, key) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is None:
        weights = torch.softmax(scores, -1)
    else:
        masks = attn_mask.dtype == torch.bool
        scores = scores.masked_fill(~attn_mask, -math.inf) if masks else scores + attn_mask
        # A query for which everything is masked gives zeros, as in torch, instead of NaN.
        blind = (scores == -math.inf).all(-1, keepdim=True)
        weights = torch.softmax(scores.masked_fill(blind, 0), -1).masked_fill(blind, 0)
    if dropout_p:
        weights = functional.dropout(weights, dropout_p)
    return torch.einsum("bhij,bhjd->bhid", weights, value).to(dtype)


ATTENTION: dict[Callable[..., Any], Callable[..., torch.Tensor]] = {
    functional.scaled_dot_product_attention: scaled_dot_product_attention,
}
