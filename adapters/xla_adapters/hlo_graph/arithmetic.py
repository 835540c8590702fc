"""`Arithmetic`: a computation on whole numbers, written instruction by instruction.

Source: `xla/service/hlo.proto` and `xla/xla_data.proto` (numbers of fields and types).
"""

from __future__ import annotations

from collections.abc import Sequence

from xla_adapters.hlo_graph import wire
from xla_adapters.hlo_graph.graph import COMPARISON_DIRECTION, DIMENSIONS
from xla_adapters.hlo_graph.shapes import PRED, U32, array_shape
from xla_adapters.hlo_graph.writing import Body, Numbers, literal, program_shape

Sizes = tuple[int, ...]


class Arithmetic:
    """Instructions on whole numbers of 32 bits without a sign, whose sums and products are modulo 2**32.

    Args:
        numbers: for its instructions.
        given: the shapes of what it reads.

    Attributes:
        parameters: what it reads.
    """

    def __init__(self, numbers: Numbers, given: Sequence[bytes]) -> None:
        self._numbers = numbers
        self._given = given
        self._body = Body((), numbers, ())
        self.parameters = [self._body.parameter(position, shape) for position, shape in enumerate(given)]

    def constant(self, value: int, sizes: Sizes = ()) -> int:
        """The same number everywhere."""
        return self.spread(self._body.add("constant", array_shape(U32), (), literal(U32, value)), sizes)

    def spread(self, number: int, sizes: Sizes) -> int:
        """A single number, everywhere."""
        return self._body.add("broadcast", array_shape(U32, *sizes), (number,)) if sizes else number

    def positions(self, size: int) -> int:
        """0, 1, 2, ..."""
        return self._body.add("iota", array_shape(U32, size), (), wire.numbers(DIMENSIONS, [0]))

    def apply(self, opcode: str, sizes: Sizes, *operands: int) -> int:
        """An operation, element by element."""
        return self._body.add(opcode, array_shape(U32, *sizes), operands)

    def less(self, one: int, other: int, sizes: Sizes) -> int:
        """Whether an element is less than the other's."""
        return self._body.add(
            "compare", array_shape(PRED, *sizes), (one, other), wire.message(COMPARISON_DIRECTION, b"LT")
        )

    def reshape(self, value: int, shape: bytes) -> int:
        """The same elements, in another shape."""
        return self._body.add("reshape", shape, (value,))

    def finished(self, name: str, results: Sequence[int], shape: bytes) -> tuple[int, bytes]:
        """The whole: its number, and its text.

        Args:
            name: of its own.
            results: what it hands out, together.
            shape: of the results together.
        """
        root = self._body.together(results, shape)
        identity = self._numbers.next()
        text = self._body.computation(f"{name}.{identity}", identity, root, program_shape(self._given, shape))
        return identity, text
