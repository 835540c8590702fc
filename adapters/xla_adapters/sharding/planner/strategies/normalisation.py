"""Strategies of normalisations: over the last dimensions, over the batch, over groups of channels."""

from __future__ import annotations

import math

from xla_adapters.sharding.mesh import DATA
from xla_adapters.sharding.planner.costs import Charge
from xla_adapters.sharding.planner.graph import Operator
from xla_adapters.sharding.planner.strategies.base import WHOLE, Rules, State, Strategy, Want


def layer_norm(operator: Operator, rules: Rules) -> list[Strategy]:
    """`layer_norm` and `rms_norm`, over any number of trailing dimensions.

    If a normalised dimension is split, sums per row are all-reduced: twice in the forward, twice in the backward.
    """
    shape = operator.argument(1, "normalized_shape")
    first = len(operator.shape) - (len(shape) if isinstance(shape, (list, tuple)) else 1)
    rows = rules.local(operator) / max(1, math.prod(operator.shape[first:]))
    found = []
    for state in rules.states(operator):
        inside = state is not None and state >= first
        charges = tuple(charge for _ in range(4) for charge in rules.sum_up(rows)) if inside else ()
        wants = [Want(state=state)]
        for _ in operator.operands[1:]:
            wants.append(_weight(state, state - first if state is not None and inside else None))
        found.append(Strategy(output=state, wants=tuple(wants), charges=charges, seconds=rules.touch(operator, state)))
    return found


def batch_norm(operator: Operator, rules: Rules) -> list[Strategy]:
    """`batch_norm`: the statistics of each channel are all-reduced over all axes that the batch is split over."""
    channels = 2 * operator.shape[1] * 4.0
    found = []
    for state in rules.states(operator):
        if state not in (None, operator.batch, 1):
            continue
        size = channels / (rules.fabric.model if state == 1 else 1)
        charges: list[Charge] = []
        for _ in range(2):
            charges += rules.fabric.all_reduce(DATA, size, "statistics")
            if state is not None and state != 1:
                charges += rules.sum_up(size, "statistics")
        wants = [Want(state=state)]
        wants += [_weight(state, 0 if state == 1 else None) for _ in operator.operands[1:]]
        found.append(
            Strategy(output=state, wants=tuple(wants), charges=tuple(charges), seconds=rules.touch(operator, state))
        )
    return found


def group_norm(operator: Operator, rules: Rules) -> list[Strategy]:
    """`group_norm`: whole groups of channels, or the batch, may be split."""
    groups = operator.argument(1, "num_groups", 1)
    found = []
    for state in rules.states(operator):
        if state in (None, operator.batch) or (state == 1 and groups % rules.fabric.model == 0):
            wants = [Want(state=state)]
            wants += [_weight(state, 0 if state == 1 else None) for _ in operator.operands[1:]]
            found.append(Strategy(output=state, wants=tuple(wants), seconds=rules.touch(operator, state)))
    return found


def _weight(state: State, dim: int | None) -> Want:
    """The layout of a weight if the input is in `state`; `dim` is the weight's dimension that is split with it."""
    if state is None:
        return WHOLE
    return Want(partial=True) if dim is None else Want(state=dim)
