"""Everything that is a sum of products: labels say which dimensions of its tensors are the same.

Splitting a label over the model axis is a strategy. A label of the output costs nothing in the forward pass, and the
gradient of each tensor that lacks it becomes a partial sum (the column-parallel layer of Megatron-LM, Shoeybi et al.,
arXiv 1909.08053; with the batch's label: data parallelism). A label that is summed over makes the output a partial
sum: all-reduced (the row-parallel layer), or scattered along another label (its sequence-parallel form).
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
    """The strategies of a sum of products.

    Args:
        operator: whose strategies.
        rules: prices.
        operands: a label for each dimension of each operand; one that is added to the output may have fewer, and a
            label of "" is a dimension that is never split.
        output: of the output.
        splittable: labels that may be split.
        work: multiplications and additions of the forward pass, for the whole tensors.
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
            # Added to the sum, when it is complete; where that is scattered, along with it.
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
        # Backward, the gradient is gathered again.
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
    """Multiplications and additions of a sum of products over all labels."""
    return 2.0 * math.prod(sizes.values())
