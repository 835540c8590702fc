"""Parameters whose updates are alike, found in a step's graph."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from xla_adapters.hlo_graph import wire
from xla_adapters.hlo_graph.graph import DIMENSIONS, Graph, Node, first_equals
from xla_adapters.hlo_graph.shapes import count, element_type, is_scalar
from xla_adapters.packing.forms import Form, Member, Operation, Owner, Ref

_ELEMENTWISE = frozenset(
    {
        "abs",
        "add",
        "and",
        "cbrt",
        "ceil",
        "clamp",
        "compare",
        "convert",
        "divide",
        "exponential",
        "exponential-minus-one",
        "floor",
        "is-finite",
        "log",
        "log-plus-one",
        "logistic",
        "maximum",
        "minimum",
        "multiply",
        "negate",
        "not",
        "or",
        "power",
        "remainder",
        "round-nearest-afz",
        "round-nearest-even",
        "rsqrt",
        "select",
        "sign",
        "sqrt",
        "subtract",
        "tanh",
        "xor",
    }
)
_SUMS = frozenset(("add", "subtract"))
# What XLA computes again wherever it is read, rather than to read it from memory: a product that is added is rounded
# once there.
_AGAIN = frozenset(("multiply", "reshape"))
# Numbers that are as precise in memory as while XLA computes with them: others are rounded when they are put in a row,
# and else perhaps not (`xla_allow_excess_precision`). All whole numbers, F32 and F64.
PRECISE = frozenset((*range(1, 10), 11, 12))
# As far as what an update reads is looked at.
_DEEPEST = 16


def find_members(graph: Graph, owners: Sequence[Owner], largest: int) -> dict[Form, list[Member]]:
    """Parameters by the form of their update.

    Args:
        graph: of a step.
        owners: the optimizers.
        largest: the most elements of a tensor that is looked at.
    """
    found: dict[Form, list[Member]] = defaultdict(list)
    operands = [tuple(_untransposed(graph, item) for item in read) for read in graph.operands]
    equals = first_equals(graph)
    for number, owner in enumerate(owners):
        small = {
            item: output
            for item, output in owner.state.items()
            if 0 < count(graph.nodes[graph.inputs[item]].shape) <= largest
            and not is_scalar(graph.nodes[graph.inputs[item]].shape)
        }
        for inputs, nodes in _updates(graph, small):
            own = Owner({item: small[item] for item in inputs}, owner.parameters)
            update = _Update(graph, operands, equals, number, own, nodes)
            if update.form is not None:
                found[update.form].append(update.member)
    return found


def _updates(graph: Graph, pairs: Mapping[int, int]) -> Iterator[tuple[list[int], set[int]]]:
    """State that hangs together (its inputs' numbers), with all nodes that depend on it."""
    inputs = {graph.inputs[item]: item for item in pairs}
    group: dict[int, int] = {}

    def root(place: int) -> int:
        while group.setdefault(place, place) != place:
            group[place] = group[group[place]]
            place = group[place]
        return place

    depends = set(inputs)
    for place, operands in enumerate(graph.operands):
        if place == graph.root:
            continue
        read = [operand for operand in operands if operand in depends]
        if read:
            depends.add(place)
            for operand in read:
                group[root(operand)] = root(place)
    parts: dict[int, tuple[list[int], set[int]]] = defaultdict(lambda: ([], set()))
    for place in depends:
        items, nodes = parts[root(place)]
        if place in inputs:
            items.append(inputs[place])
        else:
            nodes.add(place)
    yield from ((items, nodes) for items, nodes in parts.values() if items)


class _Update:
    """One parameter's update, taken apart.

    Attributes:
        form: None if it is not elementwise, or is used otherwise too.
        member: it, if it has a form.
    """

    def __init__(
        self,
        graph: Graph,
        operands: Sequence[Sequence[int]],
        equals: Sequence[int],
        number: int,
        owner: Owner,
        nodes: set[int],
    ) -> None:
        self._graph = graph
        self._operands = operands
        self._equals = equals
        self._number = number
        self._pairs = owner.state
        self._parameters = {graph.inputs[item] for item in owner.parameters}
        self._states = {graph.inputs[item]: item for item in owner.state}
        self._depends = nodes
        self._size = count(graph.nodes[next(iter(self._states))].shape)
        # The state in the order in which it is read.
        self._read: list[int] = []
        self._reading: dict[int, bool] = {}
        self.member = Member(self._size)
        self.form = self._taken_apart()

    def _taken_apart(self) -> Form | None:
        graph, root = self._graph, self._graph.nodes[self._graph.root].operands
        new = {item: root[output] for item, output in self._pairs.items()}
        if any(graph.root in graph.users[place] for place in self._states) or len(set(new.values())) < len(new):
            return None
        if not all(map(self._is_flat, self._depends)):
            return None
        inside = self._with_operands()
        dependent = {place for place in inside if self._reads_parameter(place)}
        if any(place in dependent or place not in self._depends or root.count(place) > 1 for place in new.values()):
            return None
        ends = [place for place in dependent if any(user not in dependent for user in graph.users[place])]
        apart = self._apart(inside, dependent)
        taken = self._taken(inside, apart)
        core = self._needed(inside - dependent, [*new.values(), *taken])
        if len(ends) > 1 or not self._is_closed(core, apart, set(new.values()), ends):
            return None
        self.member.nodes = self._depends | dependent
        return self._form(core, sorted(apart), new, taken)

    def _is_flat(self, place: int) -> bool:
        """Whether a node is computed element by element, each from those at its place."""
        graph = self._graph
        node = graph.nodes[place]
        if node.opcode not in _ELEMENTWISE and node.opcode != "reshape":
            return False
        return count(node.shape) == self._size and all(
            count(graph.nodes[operand].shape) == self._size and not is_scalar(graph.nodes[operand].shape)
            for operand in node.operands
        )

    def _is_number(self, place: int) -> bool:
        """Whether a node is a single number for all elements."""
        node = self._graph.nodes[place]
        return node.opcode == "broadcast" and is_scalar(self._graph.nodes[node.operands[0]].shape)

    def _with_operands(self) -> set[int]:
        """The nodes of the update, and those before them that it alone reads, or that are computed again anywhere."""
        graph, inside = self._graph, set(self._depends)
        waiting = list(inside)
        while waiting:
            for operand in self._operands[waiting.pop()]:
                if operand in inside or operand in self._states or self._is_number(operand):
                    continue
                again = graph.nodes[operand].opcode in _AGAIN
                if not self._is_flat(operand) or self._reads_parameter(operand):
                    continue
                if not all(element_type(graph.nodes[item].shape) in PRECISE for item in self._operands[operand]):
                    continue
                if again or all(user in inside for user in graph.users[operand]):
                    inside.add(operand)
                    waiting.append(operand)
        return inside

    def _reads_parameter(self, place: int, depth: int = 0) -> bool:
        """Whether a node is computed of the parameter itself: that stays a tensor of its own, and so does this."""
        if place not in self._reading:
            self._reading[place] = place in self._parameters or (
                depth <= _DEEPEST
                and not self._is_number(place)
                and self._is_flat(place)
                and any(self._reads_parameter(operand, depth + 1) for operand in self._operands[place])
            )
        return self._reading[place]

    def _apart(self, inside: set[int], dependent: set[int]) -> set[int]:
        """What is computed for the parameter alone.

        That is what depends on it, with what is computed of it alone; and products that are added there, which are
        rounded with the sum.
        """
        graph, apart = self._graph, set(dependent)
        waiting = list(apart)
        while waiting:
            place = waiting.pop()
            for operand in self._operands[place]:
                if operand in apart or self._is_number(operand) or operand in self._parameters:
                    continue
                node = graph.nodes[operand]
                is_summand = node.opcode == "multiply" and graph.nodes[place].opcode in _SUMS
                if (operand in inside and is_summand) or (
                    operand not in inside
                    and self._is_flat(operand)
                    and self._reads_parameter(operand)
                    and (node.opcode in _AGAIN or all(user in apart for user in graph.users[operand]))
                ):
                    apart.add(operand)
                    waiting.append(operand)
        return apart

    def _taken(self, inside: set[int], apart: set[int]) -> list[int]:
        """What is computed for all and read by what is computed apart."""
        taken = {
            operand: None
            for place in sorted(apart)
            for operand in self._operands[place]
            if operand not in apart and (operand in inside or operand in self._states)
        }
        return list(taken)

    def _needed(self, among: set[int], wanted: Sequence[int]) -> set[int]:
        needed: set[int] = set()
        waiting = list(wanted)
        while waiting:
            place = waiting.pop()
            if place in among and place not in needed:
                needed.add(place)
                waiting.extend(self._operands[place])
        return needed

    def _is_closed(self, core: set[int], apart: set[int], new: set[int], ends: Sequence[int]) -> bool:
        """Whether nobody else reads what is computed, but for the new state and the new parameter."""
        graph = self._graph
        for place in self._depends | self._states.keys():
            if place not in core and place not in apart and place not in self._states:
                return False
            if place in ends:
                continue
            for user in graph.users[place]:
                if user not in core and user not in apart and not (user == graph.root and place in new):
                    return False
        return True

    def _form(self, core: set[int], apart: list[int], new: Mapping[int, int], taken: Sequence[int]) -> Form | None:
        graph, member = self._graph, self.member
        refs: dict[int, Ref] = {}
        together: list[Operation] = []
        for place in sorted(core):
            operands = tuple(self._ref(operand, refs) for operand in self._operands[place])
            node = graph.nodes[place]
            if node.opcode == "reshape":
                refs[place] = operands[0]
                continue
            # It would be rounded before it is added.
            if node.opcode in _SUMS and any(
                ref[0] == "leaf" and graph.nodes[member.leaves[ref[1]]].opcode == "multiply" for ref in operands
            ):
                return None
            refs[place] = ("value", len(together))
            together.append(Operation(node.opcode, element_type(node.shape), node.rest, operands))
        if not self._states.keys() <= refs.keys():
            return None
        member.inputs = [self._states[place] for place in self._read]
        member.outputs = [self._pairs[item] for item in member.inputs]
        member.apart = apart
        results = tuple(refs[new[item]] for item in member.inputs)
        parts: dict[int, Ref] = {place: ("taken", index) for index, place in enumerate(taken)}
        own: dict[int, Ref] = {}
        alone: list[Operation] = []
        for place in apart:
            node = graph.nodes[place]
            operands = tuple(
                parts.get(operand) or own.get(operand) or self._own(operand, own) for operand in self._operands[place]
            )
            own[place] = ("value", len(alone))
            alone.append(Operation(node.opcode, element_type(node.shape), self._rest(place), operands))
        if any(map(self._is_laid_out, member.leaves)):
            return None
        read = [graph.nodes[place].shape for place in (*self._states, *member.leaves, *taken)]
        if not all(element_type(shape) in PRECISE for shape in read):
            return None
        return Form(
            self._number,
            tuple(element_type(graph.nodes[graph.inputs[item]].shape) for item in member.inputs),
            tuple(element_type(graph.nodes[place].shape) for place in member.leaves),
            tuple(together),
            results,
            tuple(refs[place] for place in taken),
            tuple(alone),
        )

    def _is_laid_out(self, place: int) -> bool:
        """Whether XLA may keep a value in another order, as that of a convolution: its norm would be summed in that."""
        graph = self._graph
        node = graph.nodes[place]
        return node.opcode == "transpose" and graph.nodes[node.operands[0]].opcode not in ("dot", "parameter")

    def _rest(self, place: int) -> bytes:
        node = self._graph.nodes[place]
        return b"" if node.opcode == "reshape" else node.rest

    def _ref(self, place: int, refs: dict[int, Ref]) -> Ref:
        if place not in refs:
            if self._is_number(place):
                return "number", self._equals[self._graph.operands[place][0]]
            if place in self._states:
                refs[place] = ("state", len(self._read))
                self._read.append(place)
            else:
                refs[place] = ("leaf", len(self.member.leaves))
                self.member.leaves.append(place)
        return refs[place]

    def _own(self, place: int, own: dict[int, Ref]) -> Ref:
        if self._is_number(place):
            return "number", self._equals[self._graph.operands[place][0]]
        own[place] = ("own", len(self.member.own))
        self.member.own.append(place)
        return own[place]


def _untransposed(graph: Graph, place: int) -> int:
    """What is transposed twice, to where it was: a gradient of `torch.nn.Linear` that was clipped, say, by its view."""
    node = graph.nodes[place]
    if node.opcode != "transpose":
        return place
    inner = graph.nodes[node.operands[0]]
    if inner.opcode != "transpose":
        return place
    outer, first = _order_of(node), _order_of(inner)
    return inner.operands[0] if [first[item] for item in outer] == list(range(len(outer))) else place


def _order_of(transpose: Node) -> list[int]:
    fields = wire.fields(transpose.rest)
    return [item for number, value, _ in fields if number == DIMENSIONS for item in wire.integers(value)]
