"""Graphs whose optimizers' state is put in rows: which of it is, and that they compute the same."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from tests.core.hlo_programs import Program, evaluate
from xla_adapters.hlo_graph.graph import Computation, Graph, read
from xla_adapters.hlo_graph.shapes import dimensions
from xla_adapters.packing import Owner, PackedModule, packed

SIZES = ((3, 2), (4,), (2, 1, 2), (4,))


class Step:
    """A program in which parameters of several shapes are updated from gradients that it is given."""

    def __init__(self) -> None:
        self.program = Program()
        self.rate = self.program.parameter()
        self.decay = self.program.parameter()
        self.outputs: list[int] = []
        # For each optimizer, by the number of an input that of an output.
        self.owners: list[dict[int, int]] = [{}, {}]
        self.parameters: set[int] = set()
        self._inputs = 2

    def given(self, *sizes: int) -> int:
        self._inputs += 1
        return self.program.parameter(*sizes)

    def state(self, *sizes: int) -> tuple[int, int]:
        """A tensor of state, and its number among the inputs."""
        return self.given(*sizes), self._inputs - 1

    def out(self, place: int) -> int:
        self.outputs.append(place)
        return len(self.outputs) - 1

    def parameter(self, *sizes: int) -> int:
        """What an optimizer updates."""
        place = self.given(*sizes)
        self.parameters.add(self._inputs - 1)
        return place

    def momentum(self, *sizes: int, gradient: int | None = None, owner: int = 0) -> int:
        """`m = m * decay + g; p = p + m * rate`; returns the new parameter."""
        apply = self.program.apply
        parameter, (moment, number) = self.parameter(*sizes), self.state(*sizes)
        gradient = self.given(*sizes) if gradient is None else gradient
        new = apply("add", apply("multiply", moment, self.program.broadcast(self.decay, *sizes)), gradient)
        self.owners[owner][number] = self.out(new)
        changed = apply("add", parameter, apply("multiply", new, self.program.broadcast(self.rate, *sizes)))
        self.out(changed)
        return changed

    def adam(self, *sizes: int) -> None:
        """Two tensors of state, of a gradient that is scaled first."""
        apply, program = self.program.apply, self.program
        parameter, gradient = self.parameter(*sizes), self.given(*sizes)
        (first, one), (second, two) = self.state(*sizes), self.state(*sizes)
        decay, rate = program.broadcast(self.decay, *sizes), program.broadcast(self.rate, *sizes)
        gradient = apply("multiply", gradient, rate)
        new = apply("add", first, apply("multiply", apply("subtract", gradient, first), decay))
        square = apply("add", apply("multiply", second, decay), apply("multiply", gradient, gradient))
        self.owners[0].update({one: self.out(new), two: self.out(square)})
        change = apply("divide", new, apply("add", apply("sqrt", square), decay))
        decayed = apply("multiply", parameter, decay)
        self.out(apply("add", decayed, apply("multiply", change, rate)))

    def packed(self, gradients: Sequence[int] = (), **options: int) -> PackedModule | None:
        owners = [Owner(state, frozenset(self.parameters)) for state in self.owners]
        return packed(self.program.module(self.outputs), owners, gradients, **{"fewest": 2, **options})


def assert_the_same(step: Step, found: PackedModule) -> None:
    """Both programs, run one operation after the other."""
    whole = step.program.module(step.outputs)
    random = np.random.default_rng(0)
    graph = read(whole)
    given = [random.standard_normal(dimensions(graph.nodes[place].shape)) for place in graph.inputs]
    expected = evaluate(whole, given)
    rows = [np.concatenate([given[number].reshape(-1) for number, _ in row]) for row in found.rows]
    results = evaluate(found.module, [*(given[number] for number in found.inputs), *rows])
    behind = len(found.outputs) + len(rows)
    assert [len(results), sorted(found.inputs)] == [behind + len(found.gradients), list(found.inputs)]
    for output, result in zip(found.outputs, results, strict=False):
        np.testing.assert_array_equal(result, expected[output])
    for gradients, result in zip(found.gradients, results[behind:], strict=True):
        np.testing.assert_array_equal(result, np.concatenate([expected[output].reshape(-1) for output in gradients]))
    for row, result in zip(found.rows, results[len(found.outputs) : behind], strict=True):
        np.testing.assert_array_equal(result, np.concatenate([expected[output].reshape(-1) for _, output in row]))


def tensors(found: PackedModule) -> list[list[int]]:
    return [[number for number, _ in row] for row in found.rows]


def parts(graph: Graph) -> list[Computation]:
    """What is left to each parameter."""
    return [called for called in graph.called if any(node.opcode == "dynamic-slice" for node in called.nodes)]


def opcodes_in_rows(graph: Graph) -> set[str]:
    """Of what is put in rows."""
    calls = (node for node in graph.nodes if node.opcode == "call")
    rows = [node for node in calls if graph.called[node.called[0]] not in parts(graph)]
    return {graph.nodes[place].opcode for row in rows for place in row.operands}


@pytest.mark.parametrize("kind", [Step.momentum, Step.adam])
def test_state_of_many_shapes_becomes_rows(kind: Callable[..., object]) -> None:
    step = Step()
    for sizes in SIZES:
        kind(step, *sizes)
    found = step.packed()
    assert found is not None
    slots = 1 if kind is Step.momentum else 2
    assert [len(row) for row in found.rows] == [len(SIZES)] * slots
    assert {number for row in tensors(found) for number in row} == step.owners[0].keys()
    assert not {*found.inputs} & step.owners[0].keys()
    assert_the_same(step, found)


def test_one_computation_for_each_shape() -> None:
    """XLA compiles what is left to a parameter once for all of its shape: nothing in it may tell them apart."""
    step = Step()
    for sizes in ((3, 2), (4,), (3, 2), (4,), (3, 2)):
        step.momentum(*sizes)
    found = step.packed()
    assert found is not None
    graph = read(found.module)
    assert len(parts(graph)) == 2
    calls = [node.called[0] for node in graph.nodes if node.opcode == "call"]
    assert sum(graph.called[place] in parts(graph) for place in calls) == 5


def test_two_optimizers_and_two_kinds_of_update_have_rows_of_their_own() -> None:
    step = Step()
    for owner in (0, 1, 0, 1):
        step.momentum(4, owner=owner)
    step.adam(4)
    step.adam(2, 2)
    found = step.packed()
    assert found is not None
    assert [len(row) for row in found.rows] == [2, 2, 2, 2]
    assert_the_same(step, found)


def test_a_gradient_that_others_read_stays() -> None:
    """Its norm, say."""
    step = Step()
    apply = step.program.apply
    for sizes in ((4,), (4,)):
        gradient = apply("multiply", step.given(*sizes), step.program.broadcast(step.rate, *sizes))
        step.out(apply("multiply", gradient, gradient))
        step.momentum(*sizes, gradient=gradient)
    found = step.packed()
    assert found is not None
    assert_the_same(step, found)


def _reads_the_state(step: Step) -> None:
    place, number = step.state(4)
    step.owners[0][number] = step.out(step.program.apply("negate", place))
    step.out(step.program.apply("tanh", place))


def _hands_it_out_twice(step: Step) -> None:
    place, number = step.state(4)
    new = step.program.apply("negate", place)
    step.owners[0][number] = step.out(new)
    step.out(new)


def _over_elements(step: Step) -> None:
    place, number = step.state(4)
    step.owners[0][number] = step.out(step.program.apply("dot", place, place))


def _as_it_was(step: Step) -> None:
    place, number = step.state(4)
    step.owners[0][number] = step.out(place)


def _of_the_parameter(step: Step) -> None:
    parameter = step.parameter(4)
    place, number = step.state(4)
    step.owners[0][number] = step.out(step.program.apply("multiply", place, parameter))


def _of_one_number(step: Step) -> None:
    place, number = step.state()
    step.owners[0][number] = step.out(step.program.apply("negate", place))


@pytest.mark.parametrize(
    "other",
    [_reads_the_state, _hands_it_out_twice, _over_elements, _as_it_was, _of_the_parameter, _of_one_number],
)
def test_state_that_is_used_otherwise_stays_as_it_is(other: Callable[[Step], None]) -> None:
    step = Step()
    for _ in range(2):
        other(step)
    assert step.packed() is None
    step.momentum(4)
    step.momentum(2)
    found = step.packed()
    assert found is not None
    assert [len(row) for row in found.rows] == [2]
    assert_the_same(step, found)


def test_a_gradient_that_waits_for_another_parameter_of_the_row() -> None:
    """As in a second update in the same step: no row could be computed at once."""
    step = Step()
    new = step.momentum(4)
    step.momentum(4, gradient=step.program.apply("tanh", new))
    assert step.packed() is None
    step.momentum(3, owner=1)
    step.momentum(2, owner=1)
    found = step.packed()
    assert found is not None
    assert [len(row) for row in found.rows] == [2]
    assert_the_same(step, found)


def test_few_or_large_tensors_stay() -> None:
    step = Step()
    for _ in range(3):
        step.momentum(4)
    assert step.packed(fewest=4) is None
    assert step.packed(fewest=3) is not None
    step.momentum(5, 8)
    found = step.packed(largest=39)
    assert found is not None
    assert math.prod(found.rows and map(len, found.rows)) == 3
    found = step.packed(largest=40)
    assert found is not None
    assert [len(row) for row in found.rows] == [4]


def test_a_product_is_rounded_with_what_it_is_added_to() -> None:
    """XLA contracts both to one operation: neither may be put in a row alone."""
    step = Step()
    for sizes in SIZES:
        step.adam(*sizes)
    found = step.packed()
    assert found is not None
    graph = read(found.module)
    for part in parts(graph):
        assert [node.opcode for node in part.nodes].count("multiply") == 2
    # What is in a row is not scaled yet: it comes as it was given.
    (row,) = (
        node for node in graph.nodes if node.opcode == "call" and graph.called[node.called[0]] not in parts(graph)
    )
    assert {graph.nodes[place].opcode for place in row.operands} == {"parameter"}


def test_what_is_transposed_twice_is_as_it_was() -> None:
    """A gradient of `torch.nn.Linear` that is clipped: the view's base is scaled, and the view made anew."""
    step = Step()
    program = step.program
    for _ in range(2):
        scaled = program.apply("multiply", program.transpose(step.given(2, 3)), program.broadcast(step.rate, 3, 2))
        step.momentum(3, 2, gradient=program.transpose(program.transpose(scaled)))
    found = step.packed()
    assert found is not None
    graph = read(found.module)
    (row,) = (
        node for node in graph.nodes if node.opcode == "call" and graph.called[node.called[0]] not in parts(graph)
    )
    assert {graph.nodes[place].opcode for place in row.operands} == {"transpose"}
    assert_the_same(step, found)


def test_what_else_is_transposed_stays() -> None:
    """A convolution's gradient: XLA lays it out as it likes, and a norm of it is summed in that order."""
    step = Step()
    for _ in range(2):
        step.momentum(3, 2, gradient=step.program.transpose(step.program.apply("tanh", step.given(2, 3))))
    assert step.packed() is None


def test_gradients_that_an_update_reads_are_its_row() -> None:
    step = Step()
    gradients = []
    for sizes in SIZES:
        gradient = step.program.apply("multiply", step.given(*sizes), step.given(*sizes))
        gradients.append(step.out(gradient))
        step.momentum(*sizes, gradient=gradient)
    kept = step.packed()
    found = step.packed(gradients)
    assert kept is not None
    assert found is not None
    assert kept.gradients == ()
    assert found.gradients == (tuple(gradients),)
    assert len(kept.outputs) == len(found.outputs) + len(SIZES)
    # They are put in a row once.
    assert len(read(found.module).called) == len(read(kept.module).called)
    assert_the_same(step, found)


def test_gradients_that_an_update_reads_otherwise_are_a_row_of_their_own() -> None:
    step = Step()
    gradients = [step.out(step.program.apply("tanh", step.given(*sizes))) for sizes in SIZES]
    for sizes in SIZES:
        step.momentum(*sizes)
    found = step.packed(gradients[1:])
    assert found is not None
    assert found.gradients == (tuple(gradients[1:]),)
    assert gradients[0] in found.outputs
    assert_the_same(step, found)


def test_large_gradients_and_single_ones_stay_what_they_are() -> None:
    step = Step()
    for sizes in SIZES:
        step.momentum(*sizes)
    large, small = (step.out(step.program.apply("tanh", step.given(count))) for count in (40, 3))
    for gradients, largest in (((large,), 40), ((large, small), 39)):
        found = step.packed(gradients, largest=largest)
        assert found is not None
        assert found.gradients == ()
        assert_the_same(step, found)
    found = step.packed((large, small), largest=40)
    assert found is not None
    assert found.gradients == ((large, small),)
    assert "2 gradients 1" in str(found)


def test_a_gradient_that_is_handed_out_twice() -> None:
    step = Step()
    gradients = []
    for sizes in SIZES:
        gradient = step.program.apply("tanh", step.given(*sizes))
        gradients += [step.out(gradient), step.out(gradient)]
        step.momentum(*sizes, gradient=gradient)
    found = step.packed(gradients)
    assert found is not None
    assert len(found.gradients) == 1
    assert_the_same(step, found)
