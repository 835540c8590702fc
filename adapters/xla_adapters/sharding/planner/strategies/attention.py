"""Strategies of `scaled_dot_product_attention`: heads, the batch or the queries may be split."""

from __future__ import annotations

import string
from dataclasses import replace

from xla_adapters.sharding.planner.graph import Operator
from xla_adapters.sharding.planner.strategies.base import Rules, Strategy
from xla_adapters.sharding.planner.strategies.contraction import contraction, volume


def attention(operator: Operator, rules: Rules) -> list[Strategy] | None:
    """Operands: query, key and value of shape (..., heads, tokens, depth), and possibly a mask that broadcasts."""
    query, key, value, *mask = operator.operands
    if not len(query.shape) == len(key.shape) == len(value.shape) >= 3:
        return None
    lead = list(string.ascii_lowercase[: len(query.shape) - 2])
    # With grouped queries there are fewer key heads, so heads are not split.
    grouped = query.shape[-3] != key.shape[-3]
    kept = [label for label, size in zip(lead, query.shape, strict=False) if size > 1]
    kept = kept[:-1] if grouped else kept
    masks = []
    for item in mask:
        offset = len(query.shape) - len(item.shape)
        own = [*lead, "Q", "T"][max(offset, 0) :]
        masks.append(["" if size == 1 else label for label, size in zip(own, item.shape, strict=True)])
    sizes = dict(zip([*lead, "Q", "D"], query.shape, strict=True)) | {"T": key.shape[-2]}
    found = contraction(
        operator,
        rules,
        operands=[[*lead, "Q", "D"], [*lead, "T", "D"], [*lead, "T", "V"], *masks],
        output=[*lead, "Q", "V"],
        splittable=[*kept, "Q"],
        work=2 * volume(sizes),
    )
    # Without a fused kernel the attention weights (queries x keys) are kept.
    scores = rules.local(operator) / operator.shape[-1] * key.shape[-2]
    return [replace(item, keeps=scores / (1 if item.output is None else rules.fabric.model)) for item in found]
