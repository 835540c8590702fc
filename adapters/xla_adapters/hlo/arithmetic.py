"""`Arithmetic`: builds an HLO computation on unsigned 32-bit integers.

Source: `xla/service/hlo.proto` and `xla/xla_data.proto` (numbers of fields and types).
"""

from __future__ import annotations

from collections.abc import Sequence

from xla_adapters.hlo import wire
from xla_adapters.hlo.builder import ComputationBuilder, IdCounter, literal, program_shape
from xla_adapters.hlo.graph import COMPARISON_DIRECTION, DIMENSIONS
from xla_adapters.hlo.shapes import PRED, U32, array_shape

Sizes = tuple[int, ...]


class Arithmetic:
    """Builds a computation on u32 arrays; sums and products are modulo 2**32.

    Methods append an instruction and return its id. `sizes` are the dimensions of the result, () for a scalar.

    Args:
        numbers: gives out instruction ids.
        given: the shapes of the computation's parameters (ShapeProto).

    Attributes:
        parameters: the instruction id of each parameter.
    """

    def __init__(self, numbers: IdCounter, given: Sequence[bytes]) -> None:
        self._numbers = numbers
        self._given = given
        self._body = ComputationBuilder((), numbers, ())
        self.parameters = [self._body.parameter(position, shape) for position, shape in enumerate(given)]

    def constant(self, value: int, sizes: Sizes = ()) -> int:
        """An array with `value` in each element."""
        return self.broadcast(self._body.add("constant", array_shape(U32), (), literal(U32, value)), sizes)

    def broadcast(self, number: int, sizes: Sizes) -> int:
        """An array with the scalar of instruction `number` in each element."""
        return self._body.add("broadcast", array_shape(U32, *sizes), (number,)) if sizes else number

    def iota(self, size: int) -> int:
        """The vector 0, 1, ..., size - 1."""
        return self._body.add("iota", array_shape(U32, size), (), wire.numbers(DIMENSIONS, [0]))

    def apply(self, opcode: str, sizes: Sizes, *operands: int) -> int:
        """An element-wise operation, by its HLO opcode."""
        return self._body.add(opcode, array_shape(U32, *sizes), operands)

    def less(self, one: int, other: int, sizes: Sizes) -> int:
        """A boolean array: element-wise `one < other`."""
        return self._body.add(
            "compare", array_shape(PRED, *sizes), (one, other), wire.message(COMPARISON_DIRECTION, b"LT")
        )

    def reshape(self, value: int, shape: bytes) -> int:
        """The same elements with another shape (ShapeProto)."""
        return self._body.add("reshape", shape, (value,))

    def finish(self, name: str, results: Sequence[int], shape: bytes) -> tuple[int, bytes]:
        """Ends the computation.

        Args:
            name: the prefix of its name; the id is appended.
            results: ids of the instructions that it returns as a tuple.
            shape: of that tuple (ShapeProto).

        Returns:
            Its id, and the computation as a HloComputationProto.
        """
        root = self._body.make_tuple(results, shape)
        identity = self._numbers.next()
        text = self._body.computation(f"{name}.{identity}", identity, root, program_shape(self._given, shape))
        return identity, text
