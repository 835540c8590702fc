"""What a strategy is: one way to run one operator on the model axis.

The batch always lies over the data axis. Over the model axis a tensor is either whole on every device (state None) or
split along one dimension (state: that dimension; if it is the one that carries the batch, the batch is split over both
axes). This is the space of Alpa (Zheng et al., OSDI 2022) for a two-dimensional mesh whose first axis is the batch's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from xla_adapters.sharding.mesh import MODEL
from xla_adapters.sharding.planner.costs import Charge, Fabric
from xla_adapters.sharding.planner.graph import Operand, Operator

State = int | None


@dataclass(frozen=True, kw_only=True)
class Want:
    """How an operator takes one tensor.

    Attributes:
        state: the dimension it is split along, of the tensor as the operator sees it.
        partial: each device gives only a part of the sum which is its gradient, so that somebody must add them up over
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
        wants: of each operand, in order.
        charges: collectives within the operator, forward and backward.
        seconds: it computes on each device, forward and backward.
        scatters: the output was scattered as it was summed up; not what a compiler does on its own.
        keeps: bytes on each device that are kept for the backward pass, beside inputs and output.
    """

    output: State
    wants: tuple[Want, ...]
    charges: tuple[Charge, ...] = ()
    seconds: float = 0.0
    scatters: bool = False
    keeps: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What all rules need: the prices, and what divides."""

    fabric: Fabric

    def splits(self, shape: Sequence[int], dim: int, batch: int | None) -> bool:
        """Whether a dimension can be split over the model axis, beside the batch over the data axis."""
        parts = self.fabric.model * (self.fabric.data if dim == batch else 1)
        return self.fabric.model > 1 and shape[dim] % parts == 0

    def states(self, operand: Operand | Operator) -> list[State]:
        """All states of a tensor."""
        return [None, *(dim for dim in range(len(operand.shape)) if self.splits(operand.shape, dim, operand.batch))]

    def local(self, operand: Operand | Operator, state: State = None) -> float:
        """Bytes on one device."""
        parts = (self.fabric.data if operand.batch is not None else 1) * (1 if state is None else self.fabric.model)
        return operand.size / parts

    def touch(self, operator: Operator, state: State) -> float:
        """Seconds to read and write the output once, and twice in the backward pass."""
        return 3 * self.local(operator, state) / self.fabric.topology.memory_bandwidth

    def sum_up(self, size: float, cause: str = "activations") -> tuple[Charge, ...]:
        """An all-reduce over the model axis."""
        return self.fabric.all_reduce(MODEL, size, cause)


def whole(operator: Operator, rules: Rules) -> Strategy:
    """The strategy that is always valid: everything whole on the model axis."""
    return Strategy(output=None, wants=(WHOLE,) * len(operator.operands), seconds=rules.touch(operator, None))
