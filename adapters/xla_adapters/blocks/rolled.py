"""`LoopWriter`: blocks that follow each other, as a loop over what each of them reads and leaves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from xla_adapters.blocks.block import Block
from xla_adapters.blocks.loops import Carried, Given, Loop, Made, Same
from xla_adapters.blocks.regions import Region
from xla_adapters.hlo_graph import wire
from xla_adapters.hlo_graph.graph import CALLED, COMPARISON_DIRECTION, DIMENSIONS, SLICE_SIZES, Graph
from xla_adapters.hlo_graph.shapes import PRED, U32, array_shape, dimensions, element_type, tuple_shape
from xla_adapters.hlo_graph.writing import COUNT, Body, Numbers, literal, program_shape

# The place of a value among a block's nodes, and whether it is the one that a turn begins with.
_Value = tuple[int, bool]
# The turn whose value the first turn reads, and by how much that changes from turn to turn: by 1 or -1.
_Where = tuple[int, int]


class LoopWriter:
    """Writes the loops of a graph.

    Args:
        graph: of the nodes.
        regions: that are repeated.
        blocks: of each.
        loops: by region.
        numbers: for instructions and computations.

    Attributes:
        computations: what the loops call, as messages, those that others call first.
    """

    def __init__(
        self,
        graph: Graph,
        regions: Sequence[Region],
        blocks: Sequence[Block],
        loops: Mapping[int, Loop],
        numbers: Numbers,
    ) -> None:
        self._graph = graph
        self._regions = regions
        self._blocks = blocks
        self._loops = loops
        self._numbers = numbers
        self.computations: list[bytes] = []
        self._rooms = 0
        # The instruction that has a loop's value of all turns, by region.
        self._of_all_turns: dict[tuple[int, _Value], int] = {}
        # And the one that has these nodes together.
        self._together: dict[tuple[int, ...], int] = {}

    def write(self, entry: Body, number: int, wanted: set[int]) -> None:
        """A loop, behind all it reads.

        Args:
            entry: what it is written into.
            number: of the region.
            wanted: nodes that are read by others than loops.
        """
        loop = self._loops[number]
        occurrences = [self._regions[number].occurrences[turn] for turn in loop.turns]
        # The same value may be carried twice, if the first turn reads two.
        carried = list(dict.fromkeys(source for source in loop.sources if isinstance(source, Carried)))
        ends = {source.local for source in carried}
        single = {
            local: [turn for turn, places in enumerate(occurrences) if places[local] in wanted]
            for local in self._blocks[number].read(wanted)
        }
        # The state of the loop's end has it.
        single = {
            local: turns for local, turns in single.items() if local not in ends or turns[0] + 1 < len(occurrences)
        }
        stacked: list[_Value] = sorted({(local, False) for local in single} | self._read_by_loops(number))
        whole, begin = self._loop(entry, number, carried, stacked)
        shapes = [self._graph.nodes[place].shape for place in occurrences[-1]]
        for index, source in enumerate(carried):
            entry.at[occurrences[-1][source.local]] = entry.element(whole, 1 + index, shapes[source.local])
        for index, (local, begun) in enumerate(stacked):
            stack = entry.element(whole, begin + index, _stacked(shapes[local], len(occurrences)))
            self._of_all_turns[number, (local, begun)] = stack
        self._take_apart(entry, number, occurrences, single)

    def _read_by_loops(self, number: int) -> set[_Value]:
        return {
            (source.local, source.begun)
            for loop in self._loops.values()
            for source in loop.sources
            if isinstance(source, Made) and source.region == number
        }

    # ---- the loop ------------------------------------------------------------------------------------

    def _loop(self, entry: Body, number: int, carried: Sequence[Carried], stacked: Sequence[_Value]) -> tuple[int, int]:
        """The instruction that has its end, and where the values of all turns begin there."""
        loop, nodes = self._loops[number], self._graph.nodes
        turns = len(loop.turns)
        shapes = [nodes[place].shape for place in self._regions[number].occurrences[0]]
        state = [entry.count(0), *(entry.at[source.first] for source in carried)]
        state_shapes = [COUNT, *(shapes[source.local] for source in carried)]
        begin = len(state)
        for local, _ in stacked:
            state_shapes.append(_stacked(shapes[local], turns))
            state.append(self._room(entry, state_shapes[-1]))
        read: dict[int, int] = {}
        reads: list[tuple[int, _Where | None]] = []
        for source, places in zip(loop.sources, self._blocks[number].inputs, strict=True):
            shape = nodes[places[0]].shape
            if isinstance(source, Carried):
                reads.append((1 + carried.index(source), None))
                continue
            value, where = self._read(entry, source)
            if value not in read:
                read[value] = len(state)
                state.append(value)
                state_shapes.append(self._shape(source, shape))
            reads.append((read[value], where))
        whole = tuple_shape(state_shapes)
        body = self._body(number, carried, stacked, reads, state_shapes)
        condition = self._condition(whole, turns)
        init = entry.together(state, whole)
        return entry.add("while", whole, [init], wire.numbers(CALLED, [body, condition])), begin

    def _room(self, entry: Body, shape: bytes) -> int:
        """Numbers in whose place turns put theirs: no two alike, or XLA would make one of them, and copies."""
        self._rooms += 1
        number = entry.add("constant", array_shape(U32), (), literal(U32, self._rooms))
        return entry.add("broadcast", shape, [entry.add("convert", array_shape(element_type(shape)), [number])])

    def _read(self, entry: Body, source: Same | Given | Made) -> tuple[int, _Where | None]:
        """The instruction that has it, and which turn's value it is in the first turn, and how that goes on."""
        if isinstance(source, Same):
            return entry.at[source.place], None
        if isinstance(source, Made):
            return self._of_all_turns[source.region, (source.local, source.begun)], (source.start, source.step)
        back = source.places[::-1]
        if back in self._together:
            return self._together[back], (len(back) - 1, -1)
        if source.places not in self._together:
            self._together[source.places] = self._put_together(entry, source.places)
        return self._together[source.places], (0, 1)

    def _shape(self, source: Same | Given | Made, shape: bytes) -> bytes:
        """Of the instruction that has it, by the shape that a turn reads."""
        if isinstance(source, Same):
            return shape
        return _stacked(shape, len(source.places if isinstance(source, Given) else self._loops[source.region].turns))

    def _put_together(self, entry: Body, places: Sequence[int]) -> int:
        shape = self._graph.nodes[places[0]].shape
        one = _stacked(shape, 1)
        parts = [entry.add("reshape", one, [entry.at[place]]) for place in places]
        return entry.add("concatenate", _stacked(shape, len(places)), parts, wire.numbers(DIMENSIONS, [0]))

    def _condition(self, state: bytes, turns: int) -> int:
        body = Body((), self._numbers, ())
        count = body.element(body.parameter(0, state), 0, COUNT)
        less = wire.message(COMPARISON_DIRECTION, b"LT")
        result = array_shape(PRED)
        root = body.add("compare", result, [count, body.count(turns)], less)
        return self._finish(body, "condition", root, program_shape([state], result))

    def _body(
        self,
        number: int,
        carried: Sequence[Carried],
        stacked: Sequence[_Value],
        reads: Sequence[tuple[int, _Where | None]],
        state: Sequence[bytes],
    ) -> int:
        block, nodes = self._blocks[number], self._graph.nodes
        shapes = [nodes[place].shape for place in self._regions[number].occurrences[0]]
        body = Body((), self._numbers, ())
        given = body.parameter(0, tuple_shape(state))
        old = [body.element(given, index, shape) for index, shape in enumerate(state)]
        turn = _Turn(body, old[0])
        operands = []
        for (index, where), places in zip(reads, block.inputs, strict=True):
            value = old[index]
            operands.append(value if where is None else turn.part(value, where, nodes[places[0]].shape))
        outputs = sorted({*(source.local for source in carried), *(local for local, begun in stacked if not begun)})
        identity = self._numbers.next()
        text, result = block.computation(identity, outputs)
        self.computations.append(text)
        call = body.add("call", result, operands, wire.numbers(CALLED, [identity]))
        out = {local: body.element(call, index, shapes[local]) for index, local in enumerate(outputs)}
        new = [body.add("add", COUNT, [old[0], body.count(1)]), *(out[source.local] for source in carried)]
        for local, begun in stacked:
            value = old[1 + [source.local for source in carried].index(local)] if begun else out[local]
            new.append(turn.put(old[len(new)], value, shapes[local], state[len(new)]))
        new += old[len(new) :]
        whole = tuple_shape(state)
        return self._finish(body, "turn", body.together(new, whole), program_shape([whole], whole))

    def _finish(self, body: Body, name: str, root: int, program: bytes) -> int:
        identity = self._numbers.next()
        self.computations.append(body.computation(f"{name}.{identity}", identity, root, program))
        return identity

    # ---- behind it -----------------------------------------------------------------------------------

    def _take_apart(
        self, entry: Body, number: int, occurrences: Sequence[Sequence[int]], single: Mapping[int, Sequence[int]]
    ) -> None:
        """What others than loops read of it: a call for each turn, which is told by the one before which turn it is."""
        read = sorted({turn for turns in single.values() for turn in turns})
        if not read:
            return
        calls: dict[tuple[tuple[int, ...], int], tuple[int, bytes]] = {}
        count = entry.count(read[0])
        for turn, following in zip(read, [*read[1:], read[-1] + 1], strict=True):
            places = occurrences[turn]
            parts = tuple(local for local, turns in single.items() if turn in turns)
            shapes = [self._graph.nodes[places[local]].shape for local in parts]
            key = parts, following - turn
            if key not in calls:
                calls[key] = self._parts(shapes, len(occurrences), following - turn)
            stacks = [self._of_all_turns[number, (local, False)] for local in parts]
            call = entry.call(calls[key], [*stacks, count])
            for index, local in enumerate(parts):
                entry.at[places[local]] = entry.element(call, index, shapes[index])
            count = entry.element(call, len(parts), COUNT)

    def _parts(self, shapes: Sequence[bytes], turns: int, following: int) -> tuple[int, bytes]:
        """A turn's parts, and which turn is the next, as a computation: its number, and the shape of its result.

        Args:
            shapes: of the parts.
            turns: of the loop.
            following: how many turns on the next one is.
        """
        body = Body((), self._numbers, ())
        given = [*(_stacked(shape, turns) for shape in shapes), COUNT]
        *stacks, count = (body.parameter(index, shape) for index, shape in enumerate(given))
        turn = _Turn(body, count)
        parts = [turn.part(stack, (0, 1), shape) for stack, shape in zip(stacks, shapes, strict=True)]
        result = tuple_shape([*shapes, COUNT])
        root = body.together([*parts, body.counted_on(count, following)], result)
        return self._finish(body, "parts", root, program_shape(given, result)), result


class _Turn:
    """A turn's own part of what is of all turns."""

    def __init__(self, body: Body, count: int) -> None:
        self._body = body
        self._count = count
        self._indices: dict[_Where, int] = {(0, 1): count}

    def part(self, stack: int, where: _Where, shape: bytes) -> int:
        """What a turn reads, by the turn it is of at first, and how that goes on."""
        one = _stacked(shape, 1)
        sizes = wire.numbers(SLICE_SIZES, dimensions(one))
        part = self._body.add("dynamic-slice", one, [stack, *self._begin(where, shape)], sizes)
        return self._body.add("reshape", shape, [part])

    def put(self, stack: int, value: int, shape: bytes, stack_shape: bytes) -> int:
        """All turns' values, with this one's."""
        one = self._body.add("reshape", _stacked(shape, 1), [value])
        return self._body.add("dynamic-update-slice", stack_shape, [stack, one, *self._begin((0, 1), shape)])

    def _begin(self, where: _Where, shape: bytes) -> list[int]:
        start, step = where
        if where not in self._indices:
            begin = self._body.count(start)
            operands = [begin, self._count]
            self._indices[where] = self._body.add("add" if step > 0 else "subtract", COUNT, operands)
        sizes = len(dimensions(shape))
        return [self._indices[where], *(self._body.count(0) for _ in range(sizes))]


def _stacked(shape: bytes, turns: int) -> bytes:
    return array_shape(element_type(shape), turns, *dimensions(shape))
