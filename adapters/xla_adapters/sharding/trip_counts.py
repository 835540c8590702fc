"""`trip_count`: how often a loop of an HLO module runs, from its counter, where the module does not state it.

For TPUs XLA writes products whose operand is gathered, or whose result is scattered, as loops of collective-permutes
("windowed" products, Wang et al., ASPLOS 2023), and does not state their trip counts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from xla_adapters.sharding.hlo_text import Instruction, Module, elements

_CONDITION, _BODY = re.compile(r"\bcondition=%?([\w.\-]+)"), re.compile(r"\bbody=%?([\w.\-]+)")
_COMMENT = re.compile(r"/\*.*?\*/")
_INDEX = re.compile(r"\bindex=(\d+)")
# Their result is their operand.
_SAME = ("copy", "bitcast", "convert")


def trip_count(module: Module, computation: str, loop: Instruction) -> int | None:
    """The trips of a loop that counts by a constant, from a constant up to one; None for other loops.

    Args:
        module: the module.
        computation: the name of the one that has the loop.
        loop: the `while`.
    """
    condition, body = _CONDITION.search(loop.attributes), _BODY.search(loop.attributes)
    if condition is None or body is None:
        return None
    outside, test, inside = (
        _Values(module.computations.get(name, ())) for name in (computation, condition.group(1), body.group(1))
    )
    root = test.root
    if root is None or root.opcode != "compare" or "direction=LT" not in root.attributes:
        return None
    counter, limit = (test.operand(root, position) for position in (0, 1))
    place, end = test.element(counter), test.constant(limit)
    if place is None or end is None or inside.root is None:
        return None
    initial = outside.by_name.get(outside.operand(loop, 0))
    begin = None if initial is None else outside.constant(outside.operand(initial, place))
    step = inside.step(inside.operand(inside.root, place), place)
    if begin is None or not step or step < 0:
        return None
    return max(0, -(-(end - begin) // step))


class _Values:
    """The instructions of a computation by name."""

    def __init__(self, instructions: tuple[Instruction, ...]) -> None:
        self.by_name: Mapping[str, Instruction] = {item.name: item for item in instructions}
        self.root = next((item for item in instructions if item.root), None)

    def operand(self, instruction: Instruction, position: int) -> str:
        """The name of an operand; empty if there is none. An element of a tuple is `name#3`."""
        parts = elements(f"({_COMMENT.sub('', instruction.operands)})")
        # The long form has the type before the name.
        return parts[position].split()[-1].lstrip("%") if position < len(parts) else ""

    def constant(self, name: str) -> int | None:
        """The value of an integer constant."""
        item = self._followed(name)
        if item is None or item.opcode != "constant" or not item.operands.strip().isdigit():
            return None
        return int(item.operands)

    def element(self, name: str) -> int | None:
        """Which element of the computation's parameter this is."""
        name, _, place = name.partition("#")
        if not place:
            item = self._followed(name)
            found = _INDEX.search(item.attributes) if item is not None and item.opcode == "get-tuple-element" else None
            if item is None:
                return None
            if item.opcode in _SAME:
                return self.element(self.operand(item, 0))
            if found is None:
                return None
            name, place = self.operand(item, 0), found.group(1)
        source = self.by_name.get(name)
        return int(place) if source is not None and source.opcode == "parameter" else None

    def step(self, name: str, place: int) -> int | None:
        """The constant that is added to this element of the parameter."""
        item = self._followed(name)
        if item is None or item.opcode != "add":
            return None
        names = [self.operand(item, position) for position in (0, 1)]
        for one, other in (names, names[::-1]):
            if self.element(one) == place:
                return self.constant(other)
        return None

    def _followed(self, name: str) -> Instruction | None:
        """The instruction behind copies; the last copy if it is of an element of a tuple."""
        item = self.by_name.get(name)
        while item is not None and item.opcode in _SAME:
            behind = self.by_name.get(self.operand(item, 0))
            if behind is None:
                break
            item = behind
        return item
