"""Strategies of convolutions: input channels, output channels or the batch may be split; pixels may not."""

from __future__ import annotations

import math

from xla_adapters.sharding.planner.graph import Operator
from xla_adapters.sharding.planner.strategies.base import Rules, Strategy
from xla_adapters.sharding.planner.strategies.contraction import contraction


def convolution(operator: Operator, rules: Rules) -> list[Strategy] | None:
    """Operands: (batch, in, pixels...), (out, in, kernel...), possibly a bias. None for groups, or without a batch."""
    x, weight, *bias = operator.operands
    if len(x.shape) != len(weight.shape) or operator.argument(6, "groups", 1) not in (1, None):
        return None
    pixels = [""] * (len(x.shape) - 2)
    return contraction(
        operator,
        rules,
        operands=[["B", "C", *pixels], ["O", "C", *pixels], *([["O", *pixels]] if bias else [])],
        output=["B", "O", *pixels],
        splittable=["B", "O", "C"],
        work=2.0 * math.prod(operator.shape) * math.prod(weight.shape[1:]),
    )
