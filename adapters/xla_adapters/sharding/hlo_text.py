"""Reads XLA's texts: HLO modules (`parse_module`), trips of loops (`trip_count`), and memory (`read_memory_report`)."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from xla_adapters.errors import ConfigError

_ARRAY = re.compile(r"\b([a-z]+\d*[a-z\d]*)\[([^\]]*)\](?:\{([^}]*)\})?")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_INSTRUCTION = re.compile(r"^\s*(?:ROOT\s+)?%?([\w.\-]+)\s+=\s+(.*)$")
_HEADER = re.compile(r"^\s*(ENTRY\s+)?%?([\w.\-]+)\s*(?:\(.*->.*)?\{\s*$")
_CLOSED = re.compile(r"^\s*\}(?:, execution_thread=.*)?\s*$")
_OPCODE = re.compile(r"\s*([a-z][a-z\d\-]*)\(")
_CALLED = re.compile(
    r"\b(?:calls|to_apply|body|condition|true_computation|false_computation|branch_computations|called_computations)="
    r"(\{[^}]*\}|%?[\w.\-]+)"
)
# Types whose name does not end with their width in bits.
_BITS = {"pred": 8, "token": 0, "opaque": 0}


@dataclass(frozen=True, kw_only=True)
class Instruction:
    """One instruction of a computation.

    Attributes:
        name: without `%`.
        type: of its result, as text.
        opcode: e.g. `"all-reduce"`.
        attributes: the text after the operands.
        operands: as text.
        called: names of the computations that it calls.
        root: whether it is the result of its computation.
    """

    name: str
    type: str
    opcode: str
    attributes: str
    operands: str = ""
    called: tuple[str, ...] = ()
    root: bool = False

    @property
    def plain_attributes(self) -> str:
        """The attributes without quoted strings, which may contain any text (names in the user's code)."""
        return _STRING.sub('""', self.attributes)


@dataclass(frozen=True, kw_only=True)
class Module:
    """A parsed HLO module.

    Attributes:
        computations: by name.
        entry: the name of the entry computation.
        replicas, partitions: the numbers that the module was compiled for.
    """

    computations: Mapping[str, tuple[Instruction, ...]] = field(default_factory=dict)
    entry: str = ""
    replicas: int = 1
    partitions: int = 1


def parse_module(text: str) -> Module:
    """Parses HLO text, long or short form.

    Raises:
        ConfigError: the text has no computation.
    """
    computations: dict[str, list[str]] = {}
    current: list[str] | None = None
    entry, marked = "", False
    for line in text.splitlines():
        header = _HEADER.match(line)
        if current is None:
            if header and not line.lstrip().startswith("HloModule"):
                current = computations.setdefault(header.group(2), [])
                # A module without the word ENTRY ends with the computation that runs.
                if header.group(1) or not marked:
                    entry, marked = header.group(2), bool(header.group(1))
        elif _CLOSED.match(line):
            current = None
        elif _INSTRUCTION.match(line) or not current:
            current.append(line)
        else:
            current[-1] += " " + line.strip()
    if not computations:
        raise ConfigError(
            f"this is no HLO text: it has no computation; it begins with {text[:60]!r}. Pass the text of the "
            "optimised module (XLA_FLAGS=--xla_dump_to=... --xla_dump_hlo_as_text: *after_optimizations.txt)"
        )
    return Module(
        computations={
            name: tuple(parsed for line in lines if (parsed := _parse_instruction(line)) is not None)
            for name, lines in computations.items()
        },
        entry=entry,
        replicas=_header_number(text, "replica_count"),
        partitions=_header_number(text, "num_partitions"),
    )


def _header_number(text: str, name: str) -> int:
    for line in text.splitlines():
        if line.lstrip().startswith("HloModule"):
            found = re.search(rf"\b{name}=(\d+)", line)
            return int(found.group(1)) if found else 1
    return 1


def _parse_instruction(line: str) -> Instruction | None:
    matched = _INSTRUCTION.match(line)
    if matched is None:
        return None
    name, rest = matched.groups()
    end = _end_of_type(rest)
    opcode = _OPCODE.match(rest, end)
    if opcode is None:
        return None
    closing = _closing(rest, opcode.end() - 1)
    attributes = rest[closing + 1 :]
    plain = _STRING.sub('""', attributes)
    called = tuple(
        part.strip().lstrip("%")
        for found in _CALLED.finditer(plain)
        for part in found.group(1).strip("{}").split(",")
        if part.strip()
    )
    return Instruction(
        name=name,
        type=rest[:end].strip(),
        opcode=opcode.group(1),
        attributes=attributes,
        operands=rest[opcode.end() : closing],
        called=called,
        root=line.lstrip().startswith("ROOT "),
    )


def _end_of_type(text: str) -> int:
    """The end of the type at the start of the text. Layouts contain parentheses, and tuples contain spaces."""
    if text.startswith("("):
        return _closing(text, 0) + 1
    depth = 0
    for index, character in enumerate(text):
        depth += (character in "[{(") - (character in "]})")
        if character == " " and depth == 0:
            return index
    return len(text)


def _closing(text: str, opening: int) -> int:
    """The index of the parenthesis that closes the one at `opening`; quoted text is skipped."""
    depth, index = 0, opening
    while index < len(text):
        if text[index] == '"':
            quoted = _STRING.match(text, index)
            index = quoted.end() if quoted else index + 1
            continue
        depth += (text[index] == "(") - (text[index] == ")")
        if depth == 0:
            return index
        index += 1
    return len(text) - 1


def elements(type_text: str) -> tuple[str, ...]:
    """The elements of a tuple type; another type is returned as the only element."""
    if not type_text.startswith("("):
        return (type_text,)
    parts, depth, begin = [], 0, 1
    for index, character in enumerate(type_text):
        depth += (character in "[{(") - (character in "]})")
        if (character == "," and depth == 1) or depth == 0:
            parts.append(type_text[begin:index].strip())
            begin = index + 1
            if depth == 0:
                break
    return tuple(part for part in parts if part)


def bytes_by_dtype(type_text: str) -> dict[str, int]:
    """Bytes of a type by element type, all elements of a tuple together.

    Types of less than a byte take a whole byte, unless the layout packs them (`s4[8]{0:E(4)}`), as in XLA's
    `ShapeUtil::ByteSizeOfElements`. Padding by tiles is not counted.

    Raises:
        ConfigError: an element type is unknown.
    """
    totals: dict[str, int] = {}
    for dtype, sizes, layout in _arrays(type_text):
        # A dynamic dimension, `<=8`, is counted at its bound.
        count = math.prod(int(size.strip().lstrip("<=")) for size in sizes.split(",") if size.strip())
        packed = re.search(r"E\((\d+)\)", layout)
        bits = int(packed.group(1)) if packed else max(_bits(dtype), 8 if _bits(dtype) else 0)
        if bits:
            totals[dtype] = totals.get(dtype, 0) + -(-count * bits // 8)
    return totals


def _arrays(type_text: str) -> Iterator[tuple[str, str, str]]:
    for found in _ARRAY.finditer(type_text):
        yield found.group(1), found.group(2), found.group(3) or ""


def _bits(dtype: str) -> int:
    if dtype in _BITS:
        return _BITS[dtype]
    # f8e4m3fn, f4e2m1fn, bf16, s4, c64: the first number is the width.
    found = re.match(r"(?:f|bf|s|u|c)(\d+)", dtype)
    if found is None:
        raise ConfigError(f"the HLO has the element type {dtype!r}, whose size is not known")
    return int(found.group(1))


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


_ALLOCATION = re.compile(r"\ballocation (\d+): size ([\d.]+)\s*([KMGTP]i)?B?\s*([,:].*)$")
_UNITS_OF_MEMORY = {"": 1, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50}


@dataclass(frozen=True, kw_only=True)
class MemoryReport:
    """Bytes on one device by kind, from XLA's buffer assignment.

    Attributes:
        arguments: parameters of the program, including donated ones.
        outputs: results that do not reuse an argument's memory.
        temporaries: intermediate values.
    """

    arguments: int = 0
    outputs: int = 0
    temporaries: int = 0

    @property
    def memory_bytes(self) -> int:
        """Arguments, outputs that do not reuse them, and temporary values."""
        return self.arguments + self.outputs + self.temporaries


def read_memory_report(text: str) -> MemoryReport:
    """Reads `*buffer-assignment.txt` (exact) or `*memory-usage-report.txt` (rounded) of an XLA dump.

    XLA writes both next to the optimised HLO with `XLA_FLAGS=--xla_dump_to=... --xla_dump_hlo_as_text`. Constants and
    the scratch memory of inner computations are not counted.

    Raises:
        ConfigError: the text has no allocation.
    """
    found: dict[str, re.Match[str]] = {}
    for line in text.splitlines():
        # The usage report lists every allocation twice.
        if (match := _ALLOCATION.search(line)) is not None:
            found.setdefault(match.group(1), match)
    if not found:
        raise ConfigError(
            f"this is no memory report of XLA: it lists no allocation; it begins with {text[:60]!r}. Pass the text of "
            "*buffer-assignment.txt or *memory-usage-report.txt"
        )
    sizes: dict[str, int] = {}
    for match in found.values():
        _, number, unit, description = match.groups()
        kind = _kind_of_memory(description)
        sizes[kind] = sizes.get(kind, 0) + round(float(number) * _UNITS_OF_MEMORY[unit or ""])
    sizes.pop("", None)
    return MemoryReport(**sizes)


def _kind_of_memory(description: str) -> str:
    # With the comma, since the shape before it may contain any word.
    if ", parameter " in description:
        return "arguments"
    if ", thread-local" in description or ", constant" in description:
        return ""
    if ", maybe-live-out" in description or ", output shape" in description:
        return "outputs"
    return "temporaries"
