"""Strategies of tensor contractions (einsum-like operators); labels name the dimensions, as in einsum.

Splitting a label over the model axis is a strategy. A label of the output costs nothing in the forward, and the
gradient of each operand that lacks it is a partial sum (the column-parallel layer of Megatron-LM, Shoeybi et al., arXiv
1909.08053; with the label of the batch: data parallelism). If a label is summed over, the output is a partial sum. It
is all-reduced (the row-parallel layer) or reduce-scattered along another label (its sequence-parallel form).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from xla_adapters.sharding.mesh import MODEL
from xla_adapters.sharding.planner.costs import Charge, Fabric
from xla_adapters.sharding.planner.graph import Operator
from xla_adapters.sharding.planner.strategies.base import WHOLE, Rules, Strategy, Want

Labels = Sequence[str]


def contraction(
    operator: Operator,
    rules: Rules,
    *,
    operands: Sequence[Labels],
    output: Labels,
    splittable: Sequence[str],
    work: float,
) -> list[Strategy]:
    """The strategies of a contraction.

    Args:
        operator: the operator.
        rules: costs.
        operands: a label for each dimension of each operand. An operand that is added to the output may have fewer
            labels; "" is a dimension that is never split.
        output: the labels of the output.
        splittable: the labels that may be split.
        work: multiplications and additions of the forward, for the whole tensors.
    """
    found = [_split(operator, rules, operands, output, None, None, work)]
    for label in splittable:
        dims = [
            (item.shape, labels.index(label), item.batch)
            for item, labels in zip(operator.operands, operands, strict=True)
            if label in labels
        ]
        if label in output:
            dims.append((operator.shape, output.index(label), operator.batch))
        if not dims or not all(rules.splits(*dim) for dim in dims):
            continue
        found.append(_split(operator, rules, operands, output, label, None, work))
        if label not in output:
            for dim, other in enumerate(output):
                if other in splittable and rules.splits(operator.shape, dim, operator.batch):
                    found.append(_split(operator, rules, operands, output, label, dim, work))
    return found


def _split(
    operator: Operator,
    rules: Rules,
    operands: Sequence[Labels],
    output: Labels,
    label: str | None,
    scatter: int | None,
    work: float,
) -> Strategy:
    fabric: Fabric = rules.fabric
    seconds = 3 * work / fabric.topology.flops / (fabric.data if operator.batch is not None else 1)
    if label is None:
        return Strategy(output=None, wants=(WHOLE,) * len(operands), seconds=seconds)
    summed = label not in output
    wants = []
    for labels in operands:
        if label in labels:
            wants.append(Want(state=labels.index(label)))
        elif summed:
            # A bias is added after the reduction; if the output is scattered, the bias is split in the same way.
            aligned = None if scatter is None else scatter - (len(output) - len(labels))
            has = aligned is not None and aligned >= 0 and labels[aligned] == output[scatter or 0]
            wants.append(Want(state=aligned) if has else Want(partial=scatter is not None))
        else:
            wants.append(Want(partial=True))
    size = rules.local(operator)
    charges: tuple[Charge, ...] = ()
    if not summed:
        state: int | None = output.index(label)
    elif scatter is None:
        charges = fabric.all_reduce(MODEL, size, "activations")
        state = None
    else:
        # In the backward the gradient is gathered.
        charges = (
            *fabric.reduce_scatter(MODEL, size, "activations"),
            *fabric.all_gather(MODEL, size, "activations"),
        )
        state = scatter
    return Strategy(
        output=state,
        wants=tuple(wants),
        charges=charges,
        seconds=seconds / fabric.model,
        scatters=scatter is not None,
    )


def volume(sizes: Mapping[str, int]) -> float:
    """Multiplications and additions of a contraction over labels of these sizes."""
    return 2.0 * math.prod(sizes.values())
