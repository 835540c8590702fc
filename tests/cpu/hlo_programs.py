"""HLO modules that are written and run by hand, one value after the other: what a compiler makes of them is theirs."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from xla_adapters.hlo import wire
from xla_adapters.hlo.builder import ComputationBuilder, IdCounter, written_module
from xla_adapters.hlo.graph import DIMENSIONS, LITERAL, PARAMETER_NUMBER, TUPLE_INDEX, Computation, Node, parse
from xla_adapters.hlo.wire import S32, U32, element_type, tuple_shape

Value = "np.ndarray | tuple[Value, ...]"
_OPERATIONS: dict[str, Callable[..., np.ndarray]] = {
    "add": np.add,
    "multiply": np.multiply,
    "subtract": np.subtract,
    "tanh": np.tanh,
    "cosine": np.cos,
    "negate": np.negative,
    "divide": np.divide,
    "maximum": np.maximum,
    "transpose": np.transpose,
    "sqrt": lambda value: np.sqrt(np.abs(value)),
    "concatenate": lambda *parts: np.concatenate(parts),
    "dot": lambda one, other: np.outer(one, other).sum(0) / 8,
}


def shape(*sizes: int) -> bytes:
    """Of an array of doubles."""
    return wire.number(2, 12) + wire.numbers(3, sizes)


@dataclass
class Program:
    """An entry computation, while it is written; nodes are known by their place."""

    nodes: list[Node] = field(default_factory=list)

    def parameter(self, *sizes: int) -> int:
        number = sum(node.opcode == "parameter" for node in self.nodes)
        return self._add("parameter", shape(*sizes), (), wire.number(PARAMETER_NUMBER, number))

    def constant(self, value: float) -> int:
        return self._add("constant", shape(), (), wire.message(LITERAL, struct.pack("<d", value)))

    def apply(self, opcode: str, *operands: int, like: int | None = None) -> int:
        return self._add(opcode, self.nodes[operands[0] if like is None else like].shape, operands)

    def broadcast(self, value: int, *sizes: int) -> int:
        return self._add("broadcast", shape(*sizes), (value,))

    def reshape(self, value: int, *sizes: int) -> int:
        return self._add("reshape", shape(*sizes), (value,))

    def transpose(self, value: int) -> int:
        """Of a matrix."""
        sizes = _sizes(self.nodes[value].shape)
        return self._add("transpose", shape(*reversed(sizes)), (value,), wire.numbers(DIMENSIONS, [1, 0]))

    def _add(self, opcode: str, made: bytes, operands: Sequence[int], rest: bytes = b"") -> int:
        self.nodes.append(Node(opcode, made, rest, tuple(operands)))
        return len(self.nodes) - 1

    def module(self, outputs: Sequence[int]) -> bytes:
        """With these as its results."""
        result = tuple_shape([self.nodes[place].shape for place in outputs])
        root = self._add("tuple", result, outputs)
        body = ComputationBuilder(self.nodes, IdCounter(), ())
        for place in range(len(self.nodes)):
            body.copy(place)
        return written_module([body.computation("entry.0", 7, body.at[root], b"")], "entry.0", 7, b"")


def run(module: bytes) -> list[np.ndarray]:
    """The results of a module, given numbers that depend on the parameter's."""
    graph = parse(module)
    parameters = [node for node in graph.nodes if node.opcode == "parameter"]
    random = np.random.default_rng(0)
    given = {}
    for node in sorted(parameters, key=_parameter_number):
        given[_parameter_number(node)] = random.standard_normal(_sizes(node.shape))
    return evaluate(module, [given[number] for number in sorted(given)])


def evaluate(module: bytes, given: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The results of a module, given its parameters."""
    graph = parse(module)
    results = _evaluate(graph, graph.called, given)
    assert isinstance(results, tuple)
    return list(results)


def _evaluate(computation: Computation, called: Sequence[Computation], arguments: Sequence[Value]) -> Value:
    values: list[Value] = []
    for node in computation.nodes:
        operands = [values[operand] for operand in node.operands]
        found: Value
        if node.opcode == "parameter":
            found = arguments[_parameter_number(node)]
            assert isinstance(found, tuple) or found.shape == _sizes(node.shape), "a parameter of another shape"
        elif node.opcode == "constant":
            found = _constant(node)
        elif node.opcode == "tuple":
            found = tuple(operands)
        elif node.opcode == "get-tuple-element":
            found = operands[0][_field(node, TUPLE_INDEX)]
        elif node.opcode == "call":
            found = _evaluate(called[node.called[0]], called, operands)
        elif node.opcode == "broadcast":
            found = np.broadcast_to(operands[0], _sizes(node.shape))
        elif node.opcode == "dynamic-slice":
            found = operands[0][_part(operands[1:], _sizes(node.shape))]
            assert found.shape == _sizes(node.shape), "a part that goes on behind the end"
        elif node.opcode == "dynamic-update-slice":
            part = _part(operands[2:], np.shape(operands[1]))
            assert np.shape(operands[0]) == _sizes(node.shape)
            assert operands[0][part].shape == np.shape(operands[1]), "a part that goes on behind the end"
            found = np.array(operands[0])
            found[part] = operands[1]
        elif node.opcode == "while":
            body, condition = (called[place] for place in node.called)
            found = operands[0]
            while _evaluate(condition, called, [found]):
                found = _evaluate(body, called, [found])
        elif node.opcode == "compare":
            found = np.less(*operands)
        elif node.opcode == "convert":
            found = np.array(operands[0], float)
        elif node.opcode == "reshape":
            found = np.reshape(operands[0], _sizes(node.shape))
        else:
            found = _OPERATIONS[node.opcode](*operands)
        values.append(found)
    return values[computation.root]


def _part(begin: Sequence[np.ndarray], sizes: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(int(at), int(at) + size) for at, size in zip(begin, sizes, strict=True))


def _constant(node: Node) -> np.ndarray:
    literal = _field(node, LITERAL)
    assert isinstance(literal, bytes)
    numbers = {S32: 4, U32: 6}.get(element_type(node.shape))
    if numbers is not None:
        return np.array(next(wire.integers(value)[0] for number, value, _ in wire.fields(literal) if number == numbers))
    return np.array(struct.unpack("<d", literal)[0])


def _field(node: Node, number: int) -> int | bytes:
    # A zero may be left out.
    return next((value for found, value, _ in wire.fields(node.rest) if found == number), 0)


def _parameter_number(node: Node) -> int:
    number = _field(node, PARAMETER_NUMBER)
    assert isinstance(number, int)
    return number


def _sizes(made: bytes) -> tuple[int, ...]:
    return tuple(size for number, value, _ in wire.fields(made) if number == 3 for size in wire.integers(value))
