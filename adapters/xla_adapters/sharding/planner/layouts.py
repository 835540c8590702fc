"""`Strategy`: one way to run one operator on the model axis; `reshard`: the cost to change a value's layout in between.

The batch is always split over the data axis. Over the model axis a tensor is either replicated (state None) or split
along one dimension (the state is its number; if it is the batch dimension, the batch is split over both axes). This is
the search space of Alpa (Zheng et al., OSDI 2022) for a mesh of two axes, of which the first is for the batch.
"""

from __future__ import annotations

from dataclasses import dataclass

from xla_adapters.sharding.mesh import MODEL
from xla_adapters.sharding.plan_data import CollectiveCost
from xla_adapters.sharding.planner.costs import Fabric, State
from xla_adapters.sharding.planner.graph import Operand, Operator


@dataclass(frozen=True, kw_only=True)
class Want:
    """The layout in which a strategy takes one operand.

    Attributes:
        state: the dimension (of the operand's view) that is split over the model axis; None if it is not split.
        partial: whether each device computes only a partial sum of the operand's gradient, which must be reduced over
            the model axis.
    """

    state: State = None
    partial: bool = False


WHOLE = Want()


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """One way to run one operator.

    Attributes:
        output: the state of the output.
        wants: the layout of each operand, in order.
        charges: collectives in the operator, forward and backward.
        seconds: compute time on each device, forward and backward.
        scatters: whether the output is reduce-scattered, which GSPMD does only with a constraint.
        keeps: bytes per device that are kept for the backward, besides inputs and output.
    """

    output: State
    wants: tuple[Want, ...]
    charges: tuple[CollectiveCost, ...] = ()
    seconds: float = 0.0
    scatters: bool = False
    keeps: float = 0.0


def whole(operator: Operator, fabric: Fabric) -> Strategy:
    """The strategy that is always valid: nothing is split over the model axis."""
    return Strategy(output=None, wants=(WHOLE,) * len(operator.operands), seconds=fabric.touch(operator, None))


_CAUSE = "activations"


@dataclass(frozen=True, kw_only=True)
class Reshard:
    """The collectives that change the layout of a value, and of its gradient in the backward.

    Attributes:
        forward, backward: the collectives.
        kept: bytes per device of a copy that is kept for the backward.
        sums: whether each device has only a partial sum of the gradient.
    """

    forward: tuple[CollectiveCost, ...] = ()
    backward: tuple[CollectiveCost, ...] = ()
    kept: float = 0.0
    sums: bool = False


def seen_as(fabric: Fabric, operand: Operand, state: State) -> State:
    """The state of a view of a value in state `state`; None if it is not split, or if the view loses the split."""
    dim = operand.dims[state] if state is not None else None
    return dim if dim is not None and fabric.splits(operand.shape, dim, operand.batch) else None


def reshard(fabric: Fabric, source: Operator, operand: Operand, state: State, want: Want) -> Reshard:
    """The change from the state of an operator's output to the layout that another operator wants.

    Args:
        fabric: costs, and which dimensions divide.
        source: the operator that makes the value.
        operand: the view of it that the user takes.
        state: the state of the value.
        want: the layout that the user wants.
    """
    view = seen_as(fabric, operand, state)
    size = min(fabric.local(operand), fabric.local(source))
    if state is not None and view is None:
        # The view cannot keep the split, so the value is gathered before.
        size = fabric.local(source)
        gather = fabric.all_gather(MODEL, size, _CAUSE)
        if want.partial:
            back = fabric.reduce_scatter(MODEL, size, _CAUSE)
        elif want.state is not None:
            back = fabric.all_gather(MODEL, fabric.local(operand), _CAUSE)
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
