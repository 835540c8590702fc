"""What it costs to bring a value from the layout it was made in to the one it is wanted in."""

from __future__ import annotations

from dataclasses import dataclass

from xla_adapters.sharding.mesh import MODEL
from xla_adapters.sharding.planner.costs import Charge
from xla_adapters.sharding.planner.graph import Operand, Operator
from xla_adapters.sharding.planner.strategies.base import Rules, State, Want

_CAUSE = "activations"


@dataclass(frozen=True, kw_only=True)
class Reshard:
    """A change of layout, and that of the gradient on its way back.

    Attributes:
        forward, backward: collectives.
        kept: bytes on each device of a copy that is kept for the backward pass.
        sums: each device has a part of the sum which is the gradient.
    """

    forward: tuple[Charge, ...] = ()
    backward: tuple[Charge, ...] = ()
    kept: float = 0.0
    sums: bool = False


def seen_as(rules: Rules, operand: Operand, state: State) -> State:
    """The state of a view of a value in this state; None also where the split is lost."""
    dim = operand.dims[state] if state is not None else None
    return dim if dim is not None and rules.splits(operand.shape, dim, operand.batch) else None


def reshard(rules: Rules, source: Operator, operand: Operand, state: State, want: Want) -> Reshard:
    """From the state of an operator's output to what another wants of a view of it."""
    fabric = rules.fabric
    view = seen_as(rules, operand, state)
    size = min(rules.local(operand), rules.local(source))
    if state is not None and view is None:
        # The view cannot be split so: the value is gathered before.
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
    # A copy for each index of the split dimension: a device's gradient is a part of the sum over them.
    copied = want.state is not None and operand.origin(want.state) is None and operand.size > source.size
    if view is None:
        if want.partial or copied:
            return Reshard(backward=fabric.all_reduce(MODEL, size, _CAUSE), sums=True)
        # A slice; the gradient is gathered.
        return Reshard(backward=fabric.all_gather(MODEL, size, _CAUSE))
    if want.state is None:
        back = fabric.reduce_scatter(MODEL, size, _CAUSE) if want.partial else ()
        return Reshard(forward=fabric.all_gather(MODEL, size, _CAUSE), backward=back, kept=size, sums=want.partial)
    if copied:
        # Each device needs the whole for its copies.
        back = fabric.reduce_scatter(MODEL, size, _CAUSE)
        return Reshard(forward=fabric.all_gather(MODEL, size, _CAUSE), backward=back, kept=size, sums=True)
    moves = fabric.all_to_all(MODEL, size, _CAUSE)
    return Reshard(forward=moves, backward=moves, kept=size / fabric.model)
