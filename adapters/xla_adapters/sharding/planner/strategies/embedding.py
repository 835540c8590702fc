"""Strategies of `embedding`, as a contraction over the vocabulary."""

from __future__ import annotations

import string

from xla_adapters.sharding.planner.graph import Operator
from xla_adapters.sharding.planner.strategies.base import Rules, Strategy
from xla_adapters.sharding.planner.strategies.contraction import contraction


def embedding(operator: Operator, rules: Rules) -> list[Strategy]:
    """Operands: a table (V, H), and ids of any shape."""
    ids = operator.operands[1]
    lead = list(string.ascii_lowercase[: len(ids.shape)])
    return contraction(
        operator,
        rules,
        operands=[["V", "H"], lead],
        output=[*lead, "H"],
        splittable=[*lead, "V", "H"],
        # A lookup is bound by memory traffic; no products are computed.
        work=operator.size / rules.fabric.topology.memory_bandwidth * rules.fabric.topology.flops,
    )
