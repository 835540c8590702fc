"""`LoopWriter`: writes loops as HLO `while` instructions.

The loop's state is a tuple: the counter, loop-carried values, a stack for each result that is read per iteration, and
the inputs. Inputs that differ between iterations are stacked along a new first dimension, and sliced in the body.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from xla_adapters.cpu.graph_passes.outlining.loops import Carried, FromLoop, Invariant, Loop, PerIteration
from xla_adapters.cpu.graph_passes.outlining.outlined_function import OutlinedFunction
from xla_adapters.cpu.graph_passes.outlining.regions import Region
from xla_adapters.hlo import wire
from xla_adapters.hlo.builder import COUNT, ComputationBuilder, IdCounter, literal, program_shape
from xla_adapters.hlo.graph import CALLED, COMPARISON_DIRECTION, DIMENSIONS, SLICE_SIZES, Graph
from xla_adapters.hlo.wire import PRED, U32, array_shape, dimensions, element_type, tuple_shape

# Position of a result among an occurrence's nodes, and whether it is meant as the input carried into the iteration.
_Value = tuple[int, bool]
# (start, step): iteration t reads the stack at `start + step * t`; the step is 1 or -1.
_Where = tuple[int, int]


class LoopWriter:
    """Writes the loops of one graph.

    Args:
        graph: the graph.
        regions: the repeated subgraphs.
        functions: the function of each region.
        loops: by number of the region.
        numbers: gives out ids.

    Attributes:
        computations: encoded HloComputationProtos that the loops call, callees first.
    """

    def __init__(
        self,
        graph: Graph,
        regions: Sequence[Region],
        functions: Sequence[OutlinedFunction],
        loops: Mapping[int, Loop],
        numbers: IdCounter,
    ) -> None:
        self._graph = graph
        self._regions = regions
        self._functions = functions
        self._loops = loops
        self._numbers = numbers
        self.computations: list[bytes] = []
        self._rooms = 0
        # By region and result: id of the stack with the results of all iterations.
        self._stacks: dict[tuple[int, _Value], int] = {}
        # By nodes: id of the stack of these inputs.
        self._together: dict[tuple[int, ...], int] = {}

    def write(self, entry: ComputationBuilder, number: int, wanted: set[int]) -> None:
        """Writes a loop; all that it reads must have been written.

        Args:
            entry: the entry computation.
            number: of the loop's region.
            wanted: nodes that are read outside of loops.
        """
        loop = self._loops[number]
        occurrences = [self._regions[number].occurrences[iteration] for iteration in loop.iterations]
        # A result may be carried twice, with two initial values.
        carried = list(dict.fromkeys(source for source in loop.sources if isinstance(source, Carried)))
        ends = {source.local for source in carried}
        single = {
            local: [iteration for iteration, places in enumerate(occurrences) if places[local] in wanted]
            for local in self._functions[number].used_results(wanted)
        }
        # The last iteration's carried values are in the loop's final state and need no stack.
        single = {
            local: iterations
            for local, iterations in single.items()
            if local not in ends or iterations[0] + 1 < len(occurrences)
        }
        stacked: list[_Value] = sorted({(local, False) for local in single} | self._read_by_loops(number))
        whole, begin = self._loop(entry, number, carried, stacked)
        shapes = [self._graph.nodes[place].shape for place in occurrences[-1]]
        for index, source in enumerate(carried):
            entry.at[occurrences[-1][source.local]] = entry.tuple_element(whole, 1 + index, shapes[source.local])
        for index, (local, begun) in enumerate(stacked):
            stack = entry.tuple_element(whole, begin + index, _stacked(shapes[local], len(occurrences)))
            self._stacks[number, (local, begun)] = stack
        self._take_apart(entry, number, occurrences, single)

    def _read_by_loops(self, number: int) -> set[_Value]:
        return {
            (source.local, source.begun)
            for loop in self._loops.values()
            for source in loop.sources
            if isinstance(source, FromLoop) and source.region == number
        }

    # ---- the loop ------------------------------------------------------------------------------------

    def _loop(
        self, entry: ComputationBuilder, number: int, carried: Sequence[Carried], stacked: Sequence[_Value]
    ) -> tuple[int, int]:
        """Writes the `while`; returns the id of its final state, and the index of the first stack in it."""
        loop, nodes = self._loops[number], self._graph.nodes
        iterations = len(loop.iterations)
        shapes = [nodes[place].shape for place in self._regions[number].occurrences[0]]
        state = [entry.index_constant(0), *(entry.at[source.first] for source in carried)]
        state_shapes = [COUNT, *(shapes[source.local] for source in carried)]
        begin = len(state)
        for local, _ in stacked:
            state_shapes.append(_stacked(shapes[local], iterations))
            state.append(self._room(entry, state_shapes[-1]))
        read: dict[int, int] = {}
        reads: list[tuple[int, _Where | None]] = []
        for source, places in zip(loop.sources, self._functions[number].inputs, strict=True):
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
        condition = self._condition(whole, iterations)
        init = entry.make_tuple(state, whole)
        return entry.add("while", whole, [init], wire.numbers(CALLED, [body, condition])), begin

    def _room(self, entry: ComputationBuilder, shape: bytes) -> int:
        """An initial stack. Each has another value, else XLA would merge them and then copy."""
        self._rooms += 1
        number = entry.add("constant", array_shape(U32), (), literal(U32, self._rooms))
        return entry.add("broadcast", shape, [entry.add("convert", array_shape(element_type(shape)), [number])])

    def _read(
        self, entry: ComputationBuilder, source: Invariant | PerIteration | FromLoop
    ) -> tuple[int, _Where | None]:
        """The id of an input (or of its stack), and where each iteration reads in the stack (None: it is no stack)."""
        if isinstance(source, Invariant):
            return entry.at[source.place], None
        if isinstance(source, FromLoop):
            return self._stacks[source.region, (source.local, source.begun)], (source.start, source.step)
        back = source.places[::-1]
        if back in self._together:
            return self._together[back], (len(back) - 1, -1)
        if source.places not in self._together:
            self._together[source.places] = self._put_together(entry, source.places)
        return self._together[source.places], (0, 1)

    def _shape(self, source: Invariant | PerIteration | FromLoop, shape: bytes) -> bytes:
        """The shape of what `_read` returned, given the shape that an iteration reads."""
        if isinstance(source, Invariant):
            return shape
        return _stacked(
            shape, len(source.places if isinstance(source, PerIteration) else self._loops[source.region].iterations)
        )

    def _put_together(self, entry: ComputationBuilder, places: Sequence[int]) -> int:
        shape = self._graph.nodes[places[0]].shape
        one = _stacked(shape, 1)
        parts = [entry.add("reshape", one, [entry.at[place]]) for place in places]
        return entry.add("concatenate", _stacked(shape, len(places)), parts, wire.numbers(DIMENSIONS, [0]))

    def _condition(self, state: bytes, iterations: int) -> int:
        body = ComputationBuilder((), self._numbers, ())
        count = body.tuple_element(body.parameter(0, state), 0, COUNT)
        less = wire.message(COMPARISON_DIRECTION, b"LT")
        result = array_shape(PRED)
        root = body.add("compare", result, [count, body.index_constant(iterations)], less)
        return self._finish(body, "condition", root, program_shape([state], result))

    def _body(
        self,
        number: int,
        carried: Sequence[Carried],
        stacked: Sequence[_Value],
        reads: Sequence[tuple[int, _Where | None]],
        state: Sequence[bytes],
    ) -> int:
        function, nodes = self._functions[number], self._graph.nodes
        shapes = [nodes[place].shape for place in self._regions[number].occurrences[0]]
        body = ComputationBuilder((), self._numbers, ())
        given = body.parameter(0, tuple_shape(state))
        old = [body.tuple_element(given, index, shape) for index, shape in enumerate(state)]
        iteration = _Iteration(body, old[0])
        operands = []
        for (index, where), places in zip(reads, function.inputs, strict=True):
            value = old[index]
            operands.append(value if where is None else iteration.part(value, where, nodes[places[0]].shape))
        outputs = sorted({*(source.local for source in carried), *(local for local, begun in stacked if not begun)})
        identity = self._numbers.next()
        text, result = function.computation(identity, outputs)
        self.computations.append(text)
        call = body.add("call", result, operands, wire.numbers(CALLED, [identity]))
        out = {local: body.tuple_element(call, index, shapes[local]) for index, local in enumerate(outputs)}
        new = [body.add("add", COUNT, [old[0], body.index_constant(1)]), *(out[source.local] for source in carried)]
        for local, begun in stacked:
            value = old[1 + [source.local for source in carried].index(local)] if begun else out[local]
            new.append(iteration.put(old[len(new)], value, shapes[local], state[len(new)]))
        new += old[len(new) :]
        whole = tuple_shape(state)
        return self._finish(body, "iteration", body.make_tuple(new, whole), program_shape([whole], whole))

    def _finish(self, body: ComputationBuilder, name: str, root: int, program: bytes) -> int:
        identity = self._numbers.next()
        self.computations.append(body.computation(f"{name}.{identity}", identity, root, program))
        return identity

    # ---- after the loop ------------------------------------------------------------------------------

    def _take_apart(
        self,
        entry: ComputationBuilder,
        number: int,
        occurrences: Sequence[Sequence[int]],
        single: Mapping[int, Sequence[int]],
    ) -> None:
        """Slices the stacks for readers outside of loops: one call per iteration (see `next_index`)."""
        read = sorted({iteration for iterations in single.values() for iteration in iterations})
        if not read:
            return
        calls: dict[tuple[tuple[int, ...], int], tuple[int, bytes]] = {}
        count = entry.index_constant(read[0])
        for iteration, following in zip(read, [*read[1:], read[-1] + 1], strict=True):
            places = occurrences[iteration]
            parts = tuple(local for local, iterations in single.items() if iteration in iterations)
            shapes = [self._graph.nodes[places[local]].shape for local in parts]
            key = parts, following - iteration
            if key not in calls:
                calls[key] = self._parts(shapes, len(occurrences), following - iteration)
            stacks = [self._stacks[number, (local, False)] for local in parts]
            call = entry.call(calls[key], [*stacks, count])
            for index, local in enumerate(parts):
                entry.at[places[local]] = entry.tuple_element(call, index, shapes[index])
            count = entry.tuple_element(call, len(parts), COUNT)

    def _parts(self, shapes: Sequence[bytes], iterations: int, following: int) -> tuple[int, bytes]:
        """A computation that slices one iteration's values out of stacks, and returns the next index too.

        Args:
            shapes: of the values.
            iterations: number of iterations of the loop.
            following: by how much the next index is larger.

        Returns:
            Its id, and the shape of its result.
        """
        body = ComputationBuilder((), self._numbers, ())
        given = [*(_stacked(shape, iterations) for shape in shapes), COUNT]
        *stacks, count = (body.parameter(index, shape) for index, shape in enumerate(given))
        iteration = _Iteration(body, count)
        parts = [iteration.part(stack, (0, 1), shape) for stack, shape in zip(stacks, shapes, strict=True)]
        result = tuple_shape([*shapes, COUNT])
        root = body.make_tuple([*parts, body.next_index(count, following)], result)
        return self._finish(body, "parts", root, program_shape(given, result)), result


class _Iteration:
    """Reads and writes the stacks at the position of one iteration.

    Args:
        body: the computation to write into.
        count: id of the iteration's number.
    """

    def __init__(self, body: ComputationBuilder, count: int) -> None:
        self._body = body
        self._count = count
        self._indices: dict[_Where, int] = {(0, 1): count}

    def part(self, stack: int, where: _Where, shape: bytes) -> int:
        """Appends the slice of a stack that the iteration reads; returns its id."""
        one = _stacked(shape, 1)
        sizes = wire.numbers(SLICE_SIZES, dimensions(one))
        part = self._body.add("dynamic-slice", one, [stack, *self._begin(where, shape)], sizes)
        return self._body.add("reshape", shape, [part])

    def put(self, stack: int, value: int, shape: bytes, stack_shape: bytes) -> int:
        """Appends the stack with this iteration's value replaced; returns its id."""
        one = self._body.add("reshape", _stacked(shape, 1), [value])
        return self._body.add("dynamic-update-slice", stack_shape, [stack, one, *self._begin((0, 1), shape)])

    def _begin(self, where: _Where, shape: bytes) -> list[int]:
        start, step = where
        if where not in self._indices:
            begin = self._body.index_constant(start)
            operands = [begin, self._count]
            self._indices[where] = self._body.add("add" if step > 0 else "subtract", COUNT, operands)
        sizes = len(dimensions(shape))
        return [self._indices[where], *(self._body.index_constant(0) for _ in range(sizes))]


def _stacked(shape: bytes, iterations: int) -> bytes:
    return array_shape(element_type(shape), iterations, *dimensions(shape))
