"""`reshard`: the cost to change the layout of a value between the operator that makes it and one that uses it."""

from __future__ import annotations

from dataclasses import dataclass

from xla_adapters.sharding.mesh import MODEL
from xla_adapters.sharding.planner.costs import Charge
from xla_adapters.sharding.planner.graph import Operand, Operator
from xla_adapters.sharding.planner.strategies.base import Rules, State, Want

_CAUSE = "activations"


@dataclass(frozen=True, kw_only=True)
class Reshard:
    """The collectives that change the layout of a value, and of its gradient in the backward.

    Attributes:
        forward, backward: the collectives.
        kept: bytes per device of a copy that is kept for the backward.
        sums: whether each device has only a partial sum of the gradient.
    """

    forward: tuple[Charge, ...] = ()
    backward: tuple[Charge, ...] = ()
    kept: float = 0.0
    sums: bool = False


def seen_as(rules: Rules, operand: Operand, state: State) -> State:
    """The state of a view of a value in state `state`; None if it is not split, or if the view loses the split."""
    dim = operand.dims[state] if state is not None else None
    return dim if dim is not None and rules.splits(operand.shape, dim, operand.batch) else None


def reshard(rules: Rules, source: Operator, operand: Operand, state: State, want: Want) -> Reshard:
    """The change from the state of an operator's output to the layout that another operator wants.

    Args:
        rules: costs, and which dimensions divide.
        source: the operator that makes the value.
        operand: the view of it that the user takes.
        state: the state of the value.
        want: the layout that the user wants.
    """
    fabric = rules.fabric
    view = seen_as(rules, operand, state)
    size = min(rules.local(operand), rules.local(source))
    if state is not None and view is None:
        # The view cannot keep the split, so the value is gathered before.
        size = rules.local(source)
        gather = fabric.all_gather(MODEL, size, _CAUSE)
        if want.partial:
            back = fabric.reduce_scatter(MODEL, size, _CAUSE)
        elif want.state is not None:
            back = fabric.all_gather(MODEL, rules.local(operand), _CAUSE)
        else:
            back = ()
        return Reshard(forward=gather, backward=back, kept=size, sums=want.partial)
    if view == want.state and not want.partial:
        return Reshard()
    # The view broadcasts along the split dimension, so the gradient on each device is a partial sum.
    copied = want.state is not None and operand.origin(want.state) is None and operand.size > source.size
    if view is None:
        if want.partial or copied:
            return Reshard(backward=fabric.all_reduce(MODEL, size, _CAUSE), sums=True)
        # Each device takes a slice, without communication; the gradient is gathered.
        return Reshard(backward=fabric.all_gather(MODEL, size, _CAUSE))
    if want.state is None:
        back = fabric.reduce_scatter(MODEL, size, _CAUSE) if want.partial else ()
        return Reshard(forward=fabric.all_gather(MODEL, size, _CAUSE), backward=back, kept=size, sums=want.partial)
    if copied:
        # Each device broadcasts, and needs the whole value for it.
        back = fabric.reduce_scatter(MODEL, size, _CAUSE)
        return Reshard(forward=fabric.all_gather(MODEL, size, _CAUSE), backward=back, kept=size, sums=True)
    moves = fabric.all_to_all(MODEL, size, _CAUSE)
    return Reshard(forward=moves, backward=moves, kept=size / fabric.model)
