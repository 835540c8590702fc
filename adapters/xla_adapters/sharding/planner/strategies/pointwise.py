"""Strategies of element-wise operators of several tensors, and of indexing, splitting and concatenation."""

from __future__ import annotations

from xla_adapters.sharding.mesh import DATA, MODEL
from xla_adapters.sharding.planner.costs import Charge, times
from xla_adapters.sharding.planner.graph import Operator
from xla_adapters.sharding.planner.strategies.base import WHOLE, Rules, Strategy, Want


def pointwise(operator: Operator, rules: Rules) -> list[Strategy]:
    """Element-wise: each operand is split as the output; one that is broadcast along the split dimension is whole."""
    found = []
    for state in rules.states(operator):
        wants = []
        for item in operator.operands:
            dim = None if state is None else state - (len(operator.shape) - len(item.shape))
            if state is None or item.free:
                wants.append(WHOLE)
            elif dim is None or dim < 0 or item.shape[dim] != operator.shape[state]:
                wants.append(Want(partial=True))
            else:
                wants.append(Want(state=dim))
        found.append(Strategy(output=state, wants=tuple(wants), seconds=rules.touch(operator, state)))
    return found


def rows(operator: Operator, rules: Rules) -> list[Strategy] | None:
    """`index`, `index_select`, `gather`, `topk`, `sort`: elements are selected or sorted along one dimension.

    The selection depends on values, so only other dimensions may be split. If it is along the batch (tokens of
    experts), every device needs the whole batch. None for forms without a rule.
    """
    item, *others = operator.operands
    if any(not other.free for other in others):
        return None
    if operator.target == "index":
        indices = operator.argument(1, "indices")
        if not isinstance(indices, (list, tuple)) or len(indices) != 1:
            return None
        picked, shift = 0, len(operator.shape) - len(item.shape)
    else:
        dim = operator.argument(2 if operator.target == "topk" else 1, "dim", -1)
        if not isinstance(dim, int):
            return None
        picked, shift = dim % max(1, len(item.shape)), 0
    found = []
    for state in rules.states(item):
        if state == picked or (state is not None and item.shape[state] != operator.shape[state + shift]):
            continue
        charges: tuple[Charge, ...] = ()
        if picked == item.batch:
            size = item.size / (1 if state is None else rules.fabric.model)
            charges = (
                *rules.fabric.all_gather(DATA, size, "activations"),
                *rules.fabric.reduce_scatter(DATA, size, "activations"),
            )
        output = None if state is None else state + shift
        wants = (Want(state=state), *(WHOLE,) * len(others))
        found.append(Strategy(output=output, wants=wants, charges=charges, seconds=rules.touch(operator, output)))
    return found


def rearranged(operator: Operator, rules: Rules) -> list[Strategy]:
    """`cat`, `split`, `index_select` and the like, of tensors of the output's rank.

    If the split dimension changes its size, shards of input and output do not match. Forward and backward, GSPMD shifts
    shards between neighbours with collective-permutes, and then exchanges the rest. (Measured with the three parts of
    GPT-2's fused projection on 2, 4 and 8 devices.)
    """
    found = []
    for state in rules.states(operator):
        tensors = [item for item in operator.operands if not item.free]
        if any(len(item.shape) != len(operator.shape) for item in tensors) and state is not None:
            continue
        wants: list[Want] = []
        charges: list[Charge] = []
        valid = True
        for item in operator.operands:
            if state is None or item.free:
                wants.append(WHOLE)
                continue
            valid = valid and rules.splits(item.shape, state, item.batch)
            wants.append(Want(state=state))
            if item.shape[state] != operator.shape[state]:
                size = min(rules.local(item), rules.local(operator))
                sizes = sorted((item.shape[state], operator.shape[state]))
                hops = rules.fabric.model * sizes[0] / sizes[1]
                for _ in range(2):
                    charges += [times(charge, hops) for charge in rules.fabric.permute(MODEL, size, "activations")]
                    charges += rules.fabric.all_to_all(MODEL, size, "activations")
        if valid:
            seconds = rules.touch(operator, state)
            found.append(Strategy(output=state, wants=tuple(wants), charges=tuple(charges), seconds=seconds))
    return found
