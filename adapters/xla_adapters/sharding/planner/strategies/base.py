"""`Strategy`: one way to run one operator on the model axis.

The batch is always split over the data axis. Over the model axis a tensor is either replicated (state None) or split
along one dimension (the state is its number; if it is the batch dimension, the batch is split over both axes). This is
the search space of Alpa (Zheng et al., OSDI 2022) for a mesh of two axes, of which the first is for the batch.
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
    charges: tuple[Charge, ...] = ()
    seconds: float = 0.0
    scatters: bool = False
    keeps: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What the rules of all operators need: costs of collectives, and which dimensions divide.

    Attributes:
        fabric: mesh and costs.
    """

    fabric: Fabric

    def splits(self, shape: Sequence[int], dim: int, batch: int | None) -> bool:
        """Whether a dimension can be split over the model axis, in addition to the batch over the data axis."""
        parts = self.fabric.model * (self.fabric.data if dim == batch else 1)
        return self.fabric.model > 1 and shape[dim] % parts == 0

    def states(self, operand: Operand | Operator) -> list[State]:
        """All possible states of a tensor."""
        return [None, *(dim for dim in range(len(operand.shape)) if self.splits(operand.shape, dim, operand.batch))]

    def local(self, operand: Operand | Operator, state: State = None) -> float:
        """Bytes of a tensor on one device."""
        parts = (self.fabric.data if operand.batch is not None else 1) * (1 if state is None else self.fabric.model)
        return operand.size / parts

    def touch(self, operator: Operator, state: State) -> float:
        """Seconds of an element-wise operator: memory traffic of the output, once forward and twice backward."""
        return 3 * self.local(operator, state) / self.fabric.topology.memory_bandwidth

    def sum_up(self, size: float, cause: str = "activations") -> tuple[Charge, ...]:
        """An all-reduce over the model axis."""
        return self.fabric.all_reduce(MODEL, size, cause)


def whole(operator: Operator, rules: Rules) -> Strategy:
    """The strategy that is always valid: nothing is split over the model axis."""
    return Strategy(output=None, wants=(WHOLE,) * len(operator.operands), seconds=rules.touch(operator, None))
