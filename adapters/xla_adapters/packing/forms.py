"""What an update is, whatever the shape of its parameter; and whose it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

# What an operation reads: `state` and `leaf` (tensors), `value` (of an operation before it), `number` (the node of a
# single number that stands for all elements); in what is left to each parameter also `taken` (of what was computed
# for all) and `own`.
Ref = tuple[str, int]


@dataclass(frozen=True)
class Operation:
    """An elementwise operation, whatever the shape.

    Attributes:
        opcode: as in HLO.
        kind: the element type of its result.
        rest: its other fields.
        operands: what it reads.
    """

    opcode: str
    kind: int
    rest: bytes
    operands: tuple[Ref, ...]


@dataclass(frozen=True)
class Form:
    """An update, whatever the shape; equal for parameters that can be updated together.

    Attributes:
        owner: the number of the optimizer.
        states, leaves: their element types.
        together: what is computed for all parameters at once.
        results: of it, the new state, in the state's order.
        taken: of it, what each parameter takes its part of.
        apart: what is computed for each parameter by itself; the last operation has its result.
    """

    owner: int
    states: tuple[int, ...]
    leaves: tuple[int, ...]
    together: tuple[Operation, ...]
    results: tuple[Ref, ...]
    taken: tuple[Ref, ...]
    apart: tuple[Operation, ...]


@dataclass(frozen=True)
class Owner:
    """An optimizer.

    Attributes:
        state: by the number of an input that is a tensor of its state that of the output with the new value.
        parameters: the numbers of inputs that it updates.
    """

    state: Mapping[int, int]
    parameters: frozenset[int]


@dataclass
class Member:
    """One parameter's update.

    Attributes:
        size: the number of elements.
        inputs: the numbers of the graph's inputs that are its state.
        outputs: the numbers of the graph's outputs that are its new state.
        leaves: nodes that are put in a row with those of other members.
        own: nodes that are read for it alone.
        apart: the nodes that are computed for it alone.
        nodes: those that are written with its update; others read the last of `apart` alone.
    """

    size: int
    inputs: list[int] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    leaves: list[int] = field(default_factory=list)
    own: list[int] = field(default_factory=list)
    apart: list[int] = field(default_factory=list)
    nodes: set[int] = field(default_factory=set)
