"""Strategies of reductions: sums, means, softmax, losses and pooling."""

from __future__ import annotations

import math
from collections.abc import Sequence

from xla_adapters.sharding.planner.costs import Charge
from xla_adapters.sharding.planner.graph import Operator
from xla_adapters.sharding.planner.strategies.base import WHOLE, Rules, Strategy, Want, whole


def reduction(operator: Operator, rules: Rules) -> list[Strategy]:
    """`sum`, `mean`, `var`, `amax` and the like; if a reduced dimension is split, the results are all-reduced."""
    item = operator.operands[0]
    rank = len(item.shape)
    dims = operator.argument(1, "dim")
    gone = _dims(dims, rank)
    keep = len(operator.shape) == rank
    found = []
    for state in rules.states(item):
        others = (WHOLE,) * (len(operator.operands) - 1)
        if state is None or state in gone:
            charges: tuple[Charge, ...] = () if state is None else rules.sum_up(rules.local(operator))
            output = None
        else:
            charges = ()
            output = state if keep else state - sum(1 for dim in gone if dim < state)
        seconds = 3 * rules.local(item, state) / rules.fabric.topology.memory_bandwidth
        found.append(Strategy(output=output, wants=(Want(state=state), *others), charges=charges, seconds=seconds))
    return found


def softmax(operator: Operator, rules: Rules) -> list[Strategy]:
    """`softmax`, `log_softmax`, `cumsum`; along a split dimension maximum and sum of each row are all-reduced."""
    dim = _dims(operator.argument(1, "dim", -1), len(operator.shape))[0]
    rows = rules.local(operator) / max(1, operator.shape[dim])
    found = []
    for state in rules.states(operator):
        charges = tuple(charge for _ in range(3) for charge in rules.sum_up(rows)) if state == dim else ()
        wants = tuple(Want(state=state) if not item.free else WHOLE for item in operator.operands)
        found.append(Strategy(output=state, wants=wants, charges=charges, seconds=rules.touch(operator, state)))
    return found


def cross_entropy(operator: Operator, rules: Rules) -> list[Strategy]:
    """Logits (rows..., classes) or (rows, classes, pixels...) to one number.

    With split classes (the vocabulary-parallel loss of Megatron-LM) the largest logit, the sum and the logit of the
    label are exchanged for each row.
    """
    logits, *others = operator.operands
    if not logits.shape:
        return [whole(operator, rules)]
    classes = min(1, len(logits.shape) - 1)
    rows = rules.local(logits) / max(1, logits.shape[classes])
    found = []
    for state in rules.states(logits):
        charges: tuple[Charge, ...] = ()
        if state == classes:
            charges = tuple(charge for _ in range(3) for charge in rules.sum_up(rows))
        elif state is not None:
            charges = rules.sum_up(operator.size)
        seconds = 3 * rules.local(logits, state) / rules.fabric.topology.memory_bandwidth
        wants = (Want(state=state), *(Want(partial=state is not None and not item.free) for item in others))
        # The gradient of the logits is made while they are there: for the product before them.
        kept = rules.local(logits, state) / (2 if rules.fabric.topology.rounds_products else 1)
        found.append(Strategy(output=None, wants=wants, charges=charges, seconds=seconds, keeps=kept))
    return found


def pooling(operator: Operator, rules: Rules) -> list[Strategy]:
    """Pooling: the batch and the channels may be split."""
    item = operator.operands[0]
    pixels = {dim for dim in range(len(item.shape)) if dim > len(item.shape) - 3}
    return [
        Strategy(output=state, wants=(Want(state=state),), seconds=rules.touch(operator, state))
        for state in rules.states(operator)
        if state not in pixels
    ]


def _dims(dims: object, rank: int) -> tuple[int, ...]:
    if isinstance(dims, int):
        return (dims % max(rank, 1),)
    if isinstance(dims, Sequence) and dims and all(isinstance(dim, int) for dim in dims):
        return tuple(dim % max(rank, 1) for dim in dims)
    return tuple(range(math.trunc(rank)))
