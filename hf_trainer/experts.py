"""Mixture-of-experts layers whose shapes do not depend on the routing of the tokens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

# The default of transformers. It sorts the tokens by expert and multiplies groups whose sizes depend on the routing.
# XLA has neither the histogram nor the grouped product.
_DEFAULT = "grouped_mm"


def dense_experts_forward(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Every expert computes every token; the output is the sum weighted by the routing weights, most of which are zero.

    It does more arithmetic than needed, by a factor of experts / experts per token. In exchange it is one graph of
    plain matrix products. `experts_implementation="batched_mm"` also has fixed shapes; it copies the weights of the
    chosen experts for each token.

    Args:
        self: the experts' module, as transformers' own implementations take it.
        hidden_states: (tokens, width).
        top_k_index: (tokens, experts per token), the chosen experts; an id beyond the last expert chooses none.
        top_k_weights: (tokens, experts per token), their weights.

    Returns:
        (tokens, width).
    """
    experts = self.num_experts
    chosen = torch.nn.functional.one_hot(top_k_index.clamp(max=experts), experts + 1)[..., :experts]
    # (tokens, experts). A sum of products, so that the router gets gradients through the chosen weights only.
    routing = (chosen.to(top_k_weights.dtype) * top_k_weights.unsqueeze(-1)).sum(dim=1)
    tokens = hidden_states.expand(experts, *hidden_states.shape)
    if self.has_gate:
        inner = self._apply_gate(_linear(self, tokens, "gate_up_proj"))
    else:
        inner = self.act_fn(_linear(self, tokens, "up_proj"))
    outer = _linear(self, inner, "down_proj")
    if self.has_post_expert_norm:
        outer = self.post_expert_norm(outer)
    result = (outer * routing.t().unsqueeze(-1).to(outer.dtype)).sum(dim=0)
    return result.to(hidden_states.dtype)


def _linear(experts: Any, inputs: torch.Tensor, name: str) -> torch.Tensor:
    """One product per expert: (experts, tokens, in) -> (experts, tokens, out)."""
    weight = getattr(experts, name)
    output = torch.bmm(inputs, weight if experts.is_transposed else weight.transpose(-2, -1))
    return output + getattr(experts, f"{name}_bias").unsqueeze(1) if experts.has_bias else output


@contextmanager
def experts_of_fixed_shape() -> Iterator[None]:
    """Replaces transformers' default implementation by `dense_experts_forward`, in its own registry."""
    overrides = ALL_EXPERTS_FUNCTIONS._local_mapping
    previous = overrides.get(_DEFAULT)
    ALL_EXPERTS_FUNCTIONS[_DEFAULT] = dense_experts_forward
    try:
        yield
    finally:
        if previous is None:
            del ALL_EXPERTS_FUNCTIONS[_DEFAULT]
        else:
            ALL_EXPERTS_FUNCTIONS[_DEFAULT] = previous
