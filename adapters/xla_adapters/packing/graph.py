"""`packed`: a step's graph whose optimizers have their state in few rows of numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from xla_adapters.hlo_graph import wire
from xla_adapters.hlo_graph.graph import DIMENSIONS, SLICE_SIZES, Graph, read
from xla_adapters.hlo_graph.order import Item, ordered
from xla_adapters.hlo_graph.shapes import array_shape, count, dimensions, element_type, tuple_shape
from xla_adapters.hlo_graph.writing import COUNT, Body, Numbers, copied_computations, program_shape, written_module
from xla_adapters.packing.forms import Form, Member, Owner, Ref
from xla_adapters.packing.members import PRECISE, find_members

# Tensors with more elements take longer to compute than what handing them over costs, and are left as they are: their
# gradients would be copied, and those of all parameters kept until the last is there.
_LARGEST = 1 << 16
# State tensors that there must be for it to be worth while: a new row is a copy from the host and back.
_FEWEST = 64


@dataclass(frozen=True, kw_only=True)
class PackedModule:
    """A step's graph in which tensors are rows of numbers together.

    Attributes:
        module: an HloModuleProto.
        inputs: what its first inputs were in the graph before, by number; then come the rows.
        outputs: likewise.
        rows: for each row its tensors, in order: the number that each was as an input, and as an output.
        gradients: for each row of gradients, which come behind the others, what its tensors were among the outputs.
    """

    module: bytes
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    rows: tuple[tuple[tuple[int, int], ...], ...]
    gradients: tuple[tuple[int, ...], ...] = ()

    def __str__(self) -> str:
        tensors = sum(map(len, self.rows))
        gradients = sum(map(len, self.gradients))
        more = f", {gradients} gradients {len(self.gradients)}" if gradients else ""
        return f"{tensors} tensors of optimizers' state are {len(self.rows)} rows of numbers{more}"


def packed(
    module: bytes,
    owners: Sequence[Owner],
    gradients: Sequence[int] = (),
    *,
    fewest: int = _FEWEST,
    largest: int = _LARGEST,
) -> PackedModule | None:
    """The same program, in which small tensors of an optimizer's state are few inputs and outputs.

    Args:
        module: an HloModuleProto, of one device and not yet optimized.
        owners: the optimizers.
        gradients: the numbers of outputs that may be in rows, too.
        fewest: the least number of tensors to do it for.
        largest: the most elements of a tensor that is moved.

    Returns:
        None if there are too few tensors whose updates are alike and elementwise.

    Raises:
        NotUnderstood: the module holds something that is not known here.
    """
    # As it is, so that XLA makes the same of all that is not packed.
    graph = read(module, merged=False)
    found = find_members(graph, owners, largest)
    groups = [(form, members) for form, members in found.items() if len(members) > 1]
    order, stuck = _order(graph, groups)
    if stuck:
        # An update that others of its group wait for, by way of what is computed with the new parameter.
        numbers = {number for number, _ in stuck}
        groups = [group for number, group in enumerate(groups) if number not in numbers]
        order, stuck = _order(graph, groups)
    if stuck or sum(len(form.states) * len(members) for form, members in groups) < fewest:
        return None
    return _Writer(graph, groups, order, [item for item in gradients if _is_small(graph, item, largest)]).written()


def _is_small(graph: Graph, output: int, largest: int) -> bool:
    shape = graph.nodes[graph.nodes[graph.root].operands[output]].shape
    return element_type(shape) in PRECISE and count(shape) <= largest


def _order(graph: Graph, groups: Sequence[tuple[Form, list[Member]]]) -> tuple[list[Item], set[Item]]:
    item_of: list[Item] = [(-1, place) for place in range(len(graph.nodes))]
    for number, (_, members) in enumerate(groups):
        for member in members:
            for place in member.nodes:
                item_of[place] = (number, 0)
    return ordered(graph, item_of)


class _Writer:
    """Writes a graph with rows in place of tensors."""

    def __init__(
        self,
        graph: Graph,
        groups: Sequence[tuple[Form, list[Member]]],
        order: Sequence[Item],
        gradients: Sequence[int],
    ) -> None:
        self._graph = graph
        self._groups = groups
        self._order = order
        self._numbers = Numbers()
        self._texts, called = copied_computations(graph.called, self._numbers)
        self._entry = Body(graph.nodes, self._numbers, called)
        self._results = graph.nodes[graph.root].operands
        moved = [member for _, members in groups for member in members]
        gone_in = {item for member in moved for item in member.inputs}
        gone_out = {item for member in moved for item in member.outputs}
        self._inputs = [item for item in range(len(graph.inputs)) if item not in gone_in]
        self._rows: dict[tuple[int, ...], int] = {}
        self._gradients = self._gradient_rows(gradients)
        gone_out.update(item for row in self._gradients for item in row)
        self._outputs = [item for item in range(len(self._results)) if item not in gone_out]

    def _gradient_rows(self, gradients: Sequence[int]) -> list[tuple[int, ...]]:
        """Which are in a row: those that an update reads in one as they are there, then what is left."""
        left = {self._results[item]: item for item in reversed(gradients)}
        rows: list[tuple[int, ...]] = []
        for form, members in self._groups:
            for slot in range(len(form.leaves)):
                leaves = [member.leaves[slot] for member in members]
                if all(leaf in left for leaf in leaves) and len(set(leaves)) == len(leaves):
                    rows.append(tuple(left.pop(leaf) for leaf in leaves))
        kinds: dict[int, list[int]] = {}
        for place, item in sorted(left.items(), key=lambda entry: entry[1]):
            kinds.setdefault(element_type(self._graph.nodes[place].shape), []).append(item)
        return rows + [tuple(row) for row in kinds.values() if len(row) > 1]

    def written(self) -> PackedModule:
        """The module."""
        graph, entry = self._graph, self._entry
        given = [graph.nodes[graph.inputs[item]].shape for item in self._inputs]
        for number, item in enumerate(self._inputs):
            entry.at[graph.inputs[item]] = entry.parameter(number, given[number])
        rows: list[tuple[tuple[int, int], ...]] = []
        row_shapes: list[bytes] = []
        states: list[list[int]] = []
        for form, members in self._groups:
            states.append([])
            for slot, kind in enumerate(form.states):
                row_shapes.append(array_shape(kind, _length(members)))
                rows.append(tuple((member.inputs[slot], member.outputs[slot]) for member in members))
                states[-1].append(entry.parameter(len(given) + len(rows) - 1, row_shapes[-1]))
        new_rows: dict[int, list[int]] = {}
        wanted = self._wanted()
        for number, place in self._order:
            if number >= 0:
                new_rows[number] = self._update(*self._groups[number], states[number])
            elif place in wanted and place not in entry.at:
                entry.copy(place)
        results = [entry.at[self._results[item]] for item in self._outputs]
        results += [row for number in range(len(self._groups)) for row in new_rows[number]]
        result_shapes = [graph.nodes[self._results[item]].shape for item in self._outputs] + row_shapes
        for gradients in self._gradients:
            leaves = [self._results[item] for item in gradients]
            shapes = [graph.nodes[leaf].shape for leaf in leaves]
            kind = element_type(shapes[0])
            result_shapes.append(array_shape(kind, sum(map(count, shapes))))
            results.append(self._row(kind, leaves))
        self._finish([*given, *row_shapes], results, tuple_shape(result_shapes))
        return PackedModule(
            module=written_module(self._texts, self._name, self._identity, self._program_shape),
            inputs=tuple(self._inputs),
            outputs=tuple(self._outputs),
            rows=tuple(rows),
            gradients=tuple(self._gradients),
        )

    def _finish(self, given: Sequence[bytes], results: Sequence[int], shape: bytes) -> None:
        root = self._entry.together(results, shape)
        self._identity = self._numbers.next()
        self._name = f"step.{self._identity}"
        self._program_shape = program_shape(given, shape)
        self._texts.append(self._entry.computation(self._name, self._identity, root, self._program_shape))

    def _wanted(self) -> set[int]:
        """The nodes that are still read."""
        graph = self._graph
        wanted = {self._results[item] for items in (self._outputs, *self._gradients) for item in items}
        for number, place in reversed(self._order):
            if number >= 0:
                form, members = self._groups[number]
                operations = (*form.together, *form.apart)
                wanted.update(item for member in members for item in (*member.leaves, *member.own))
                wanted.update(ref[1] for operation in operations for ref in operation.operands if ref[0] == "number")
            elif place in wanted:
                wanted.update(graph.operands[place])
        return wanted

    # ---- one group -----------------------------------------------------------------------------------

    def _update(self, form: Form, members: Sequence[Member], states: Sequence[int]) -> list[int]:
        """The update of all members; returns the new rows."""
        entry, length = self._entry, _length(members)
        values: dict[Ref, int] = {("state", slot): row for slot, row in enumerate(states)}
        for slot, kind in enumerate(form.leaves):
            values["leaf", slot] = self._row(kind, [member.leaves[slot] for member in members])
        for number, operation in enumerate(form.together):
            operands = [self._operand(entry, ref, values, (length,), entry.at) for ref in operation.operands]
            shape = array_shape(operation.kind, length)
            values["value", number] = entry.add(operation.opcode, shape, operands, operation.rest)
        if form.apart:
            self._distribute(form, members, [values[ref] for ref in form.taken], length)
        for member in members:
            for place in member.nodes:
                # Nobody reads it any more.
                entry.at.setdefault(place, 0)
        return [values[ref] for ref in form.results]

    def _row(self, kind: int, leaves: Sequence[int]) -> int:
        """Tensors one behind the other.

        By a call, so that each is in memory first: some are products (gradients of `torch.nn.Linear`, clipped and then
        transposed), which XLA would contract with the sums that read the row, where it does not otherwise.
        """
        key = tuple(leaves)
        if key not in self._rows:
            given = [self._graph.nodes[leaf].shape for leaf in leaves]
            length = array_shape(kind, sum(map(count, given)))
            body = Body((), self._numbers, ())
            parts = [
                body.add("reshape", array_shape(kind, count(shape)), [body.parameter(number, shape)])
                for number, shape in enumerate(given)
            ]
            root = body.add("concatenate", length, parts, wire.numbers(DIMENSIONS, [0]))
            identity = self._numbers.next()
            self._texts.append(body.computation(f"row.{identity}", identity, root, program_shape(given, length)))
            self._rows[key] = self._entry.call((identity, length), [self._entry.at[leaf] for leaf in leaves])
        return self._rows[key]

    def _operand(
        self, body: Body, ref: Ref, values: dict[Ref, int], sizes: tuple[int, ...], numbers: Mapping[int, int]
    ) -> int:
        if ref not in values:
            kind = element_type(self._graph.nodes[ref[1]].shape)
            values[ref] = body.add("broadcast", array_shape(kind, *sizes), [numbers[ref[1]]])
        return values[ref]

    def _distribute(self, form: Form, members: Sequence[Member], taken: Sequence[int], length: int) -> None:
        """What is left to each parameter: a call, so that XLA compiles one kernel for all of a shape.

        Each call is told by the one before it where its part begins.
        """
        entry, nodes = self._entry, self._graph.nodes
        parts: dict[tuple[bytes, ...], tuple[int, bytes]] = {}
        refs = (ref for operation in form.apart for ref in operation.operands)
        numbers = list(dict.fromkeys(ref[1] for ref in refs if ref[0] == "number"))
        begin = entry.count(0)
        for member in members:
            shapes = tuple(nodes[place].shape for place in (*member.own, *member.apart))
            if shapes not in parts:
                parts[shapes] = self._part(form, member, numbers, length)
            given = [*(entry.at[place] for place in member.own), *taken, *(entry.at[place] for place in numbers), begin]
            both = entry.call(parts[shapes], given)
            entry.at[member.apart[-1]] = entry.element(both, 0, shapes[-1])
            begin = entry.element(both, 1, COUNT)

    def _part(self, form: Form, member: Member, numbers: Sequence[int], length: int) -> tuple[int, bytes]:
        """One parameter's part, as a computation: its number, and the shape of its result."""
        nodes = self._graph.nodes
        kinds = [form.together[ref[1]].kind if ref[0] == "value" else form.states[ref[1]] for ref in form.taken]
        given = [nodes[place].shape for place in member.own]
        given += [array_shape(kind, length) for kind in kinds]
        given += [nodes[place].shape for place in numbers]
        given.append(COUNT)
        body = Body(nodes, self._numbers, ())
        params = [body.parameter(number, shape) for number, shape in enumerate(given)]
        begin = params[-1]
        values: dict[Ref, int] = {("own", number): params[number] for number in range(len(member.own))}
        first = len(member.own)
        at = dict(zip(numbers, params[first + len(kinds) :], strict=False))
        for place, operation in zip(member.apart, form.apart, strict=True):
            sizes = dimensions(nodes[place].shape)
            operands = []
            for ref in operation.operands:
                if ref[0] == "taken":
                    row = params[first + ref[1]]
                    operands.append(_taken(body, row, begin, kinds[ref[1]], member.size, sizes))
                elif ref[0] == "number":
                    operands.append(self._operand(body, ref, {}, sizes, at))
                else:
                    operands.append(values[ref])
            index = ("value", len(values) - len(member.own))
            values[index] = body.add(operation.opcode, nodes[place].shape, operands, operation.rest)
        end = body.counted_on(begin, member.size)
        shape = tuple_shape([nodes[member.apart[-1]].shape, COUNT])
        root = body.together([values["value", len(form.apart) - 1], end], shape)
        identity = self._numbers.next()
        self._texts.append(body.computation(f"part.{identity}", identity, root, program_shape(given, shape)))
        return identity, shape


def _taken(body: Body, row: int, begin: int, kind: int, size: int, sizes: tuple[int, ...]) -> int:
    part = body.add("dynamic-slice", array_shape(kind, size), [row, begin], wire.numbers(SLICE_SIZES, [size]))
    return body.add("reshape", array_shape(kind, *sizes), [part])


def _length(members: Sequence[Member]) -> int:
    return sum(member.size for member in members)
