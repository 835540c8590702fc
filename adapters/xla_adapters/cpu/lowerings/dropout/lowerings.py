"""`Dropout`: replacements for torch's dropout functions, with masks drawn by `MaskKeys`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from xla_adapters.cpu.lowerings.dropout.keys import MaskKeys
from xla_adapters.cpu.lowerings.dropout.masks import MOST_ELEMENTS
from xla_adapters.runtime.interface import Runtime


class Dropout:
    """Dropout for the trace of one step; it holds the keys of the step's masks.

    Args:
        runtime: the runtime, with a CPU device and the Threefry algorithm.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._keys = MaskKeys(runtime)

    def lowerings(self) -> dict[Callable[..., Any], Callable[..., torch.Tensor]]:
        """The replacements, by torch function."""
        # Not stored on self: the reference cycle would keep tensors of the step alive, as outputs of its graph.
        return {
            functional.dropout: self._dropout,
            torch.dropout: self._plain_dropout,
            functional.scaled_dot_product_attention: self._attention,
        }

    def _dropout(
        self, input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> torch.Tensor:
        """As `torch.nn.functional.dropout`."""
        if not training or not _is_drawn(p, input.shape) or not input.is_floating_point():
            return functional.dropout(input, p, training, inplace)
        kept, scale = self._keys.mask(tuple(input.shape), 1 - p), 1 / (1 - p)
        if inplace:
            return input.mul_(torch.where(kept, scale, 0.0).to(input.dtype))
        return torch.where(kept, input, 0.0) * scale

    def _plain_dropout(self, input: torch.Tensor, p: float, train: bool) -> torch.Tensor:
        """As `torch.dropout`."""
        return self._dropout(input, p, train)

    def _attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        """As `torch.nn.functional.scaled_dot_product_attention`, in the form that torch uses without a fused kernel."""
        # Only for float32: in lower precision torch drops weights before they are rounded, and autocast casts the
        # arguments, not intermediate values.
        is_single = query.dtype == key.dtype == value.dtype == torch.float32 and not torch.is_autocast_enabled("xla")
        if not (is_single and _is_drawn(dropout_p, query.shape) and key.numel()):
            return functional.scaled_dot_product_attention(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros((), device=query.device).masked_fill(~attn_mask, -math.inf)
        # The first result (attention without dropout) is unused, so XLA does not compute it.
        weights: torch.Tensor = torch.ops.aten._scaled_dot_product_attention_math(
            query, key, value, attn_mask, 0.0, is_causal, None, scale=scale, enable_gqa=enable_gqa
        )[1]
        if enable_gqa:
            value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
        return self._dropout(weights, dropout_p) @ value


def _is_drawn(p: float, sizes: tuple[int, ...]) -> bool:
    """Whether a mask must be drawn (0 < p < 1, not empty, not too large); torch raises for an invalid p."""
    return 0 < p < 1 and 0 < math.prod(sizes) < MOST_ELEMENTS
