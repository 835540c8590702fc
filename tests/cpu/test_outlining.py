"""Graphs that are taken apart into the blocks they repeat: which ones they are, and that they compute the same."""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from tests.cpu.hlo_programs import Program, run, shape
from tests.isolation import isolated
from xla_adapters import get_runtime, initialize
from xla_adapters.cpu import TUNING
from xla_adapters.cpu.graph_passes.outlining import Outlined, UnsupportedModuleError, loops, outline
from xla_adapters.cpu.graph_passes.outlining.merging import merge
from xla_adapters.cpu.graph_passes.outlining.outline import _Writer
from xla_adapters.cpu.graph_passes.outlining.peeling import peel
from xla_adapters.cpu.graph_passes.outlining.regions import Region, find_regions
from xla_adapters.hlo import wire
from xla_adapters.hlo.builder import ComputationBuilder, IdCounter, written_module
from xla_adapters.hlo.graph import Node, parse

WIDTH = 8
Layer = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def on_device(*sizes: int) -> torch.Tensor:
    return (torch.randn(sizes) / 3).to("xla").requires_grad_()


def started() -> None:
    """A device whose graphs are compiled in blocks."""
    initialize(fast_compile=True)
    get_runtime().tracing.set_eager(False)
    torch.manual_seed(0)


def layers(layer: Layer, times: int, *, gradients: bool = True) -> list[torch.Tensor]:
    """What layers compute, each with parameters of its own, and the gradients of those."""
    parameters = [(on_device(WIDTH, WIDTH), on_device(WIDTH)) for _ in range(times)]
    hidden = on_device(4, WIDTH)
    for weight, bias in parameters:
        hidden = layer(hidden, weight, bias)
    loss = hidden.square().mean()
    if not gradients:
        return [loss]
    loss.backward()  # type: ignore[no-untyped-call]
    found = [loss, *(leaf.grad for pair in parameters for leaf in pair if leaf.grad is not None)]
    return found


def outlined(tensors: Sequence[torch.Tensor]) -> Outlined | None:
    return outline(graph_text(tensors))


def graph_text(tensors: Sequence[torch.Tensor]) -> bytes:
    runtime = get_runtime()
    return runtime.executables.text([runtime.lazy.inner(tensor.detach()) for tensor in tensors])


def values_both_ways(tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """What the graph of these tensors computes as a whole, and in blocks; fails if it has none."""
    runtime = get_runtime()
    outputs = [runtime.lazy.inner(tensor.detach()) for tensor in tensors]
    feed = [item.value for item in runtime.executables.inputs(outputs)]
    found = []
    runtime.executables._calls.clear()  # type: ignore[attr-defined]
    for in_blocks in (False, True):
        TUNING.outlines_graphs = in_blocks
        name = runtime.executables.compile(outputs, [])
        assert (name in runtime.executables._calls) is in_blocks  # type: ignore[attr-defined]
        found.append([result.cpu() for result in runtime.executables.run(name, feed)])
    return found[0], found[1]


def assert_the_same(tensors: Sequence[torch.Tensor], *, rtol: float = 1e-5) -> None:
    whole, blocks = values_both_ways(tensors)
    for one, other in zip(whole, blocks, strict=True):
        torch.testing.assert_close(other, one, rtol=rtol, atol=rtol / 10)


def mixed(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    inner = nn.functional.layer_norm(hidden, (WIDTH,)) @ weight + bias
    return hidden + torch.tanh(inner) * inner.softmax(-1)


# ---- which blocks ----------------------------------------------------------------------------------------


@isolated
def test_layers_and_their_gradients_are_blocks() -> None:
    started()
    found = outlined(layers(mixed, 8))
    assert found is not None
    forward, backward, *_ = sorted(found.functions, key=lambda block: -block[1])
    # The last layer is no part of the other's surroundings, and the first one's input is not computed.
    assert 7 <= forward[0] <= 8
    assert 7 <= backward[0] <= 8
    left = [node.opcode for node in parse(found.module).nodes]
    assert left.count("dot") <= 3
    assert left.count("batch-norm-training") <= 1
    assert found.loops == found.functions
    assert left.count("while") == 2
    # Each takes the results of one iteration.
    assert left.count("call") == forward[0]
    assert found.instructions > 1.5 * len(left)


def small(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return hidden + torch.tanh(hidden @ weight + bias).exp()


@isolated
def test_small_layers_are_called() -> None:
    started()
    found = outlined(layers(small, 8))
    assert found is not None
    assert found.loops == ()
    left = [node.opcode for node in parse(found.module).nodes]
    assert left.count("call") == sum(times for times, _ in found.functions) > 8
    assert left.count("tanh") <= 2


@isolated
def test_what_is_not_repeated_stays_as_it_is() -> None:
    started()
    assert outlined(layers(mixed, 1)) is None
    assert outlined(layers(mixed, 2)) is None
    sizes = [on_device(4, 3 + size) for size in range(6)]
    assert outlined([sum((size.tanh().exp().sum() for size in sizes), torch.zeros((), device="xla"))]) is None


@isolated
def test_layers_that_convolve_stay_as_they_are() -> None:
    started()
    image = on_device(2, 4, 6, 6)
    for _ in range(6):
        image = torch.relu(nn.functional.conv2d(image, on_device(4, 4, 3, 3), on_device(4), padding=1)) + image.tanh()
    text = graph_text([image])
    assert b"convolution" in text
    assert outline(text) is None


@isolated
def test_what_is_not_known_is_named() -> None:
    started()
    text = graph_text(layers(mixed, 8, gradients=False))
    assert outline(text) is not None
    for opcode in (b"send", b"recv"):
        with pytest.raises(UnsupportedModuleError, match=opcode.decode()):
            outline(text.replace(wire.message(2, b"tanh"), wire.message(2, opcode)))
    with pytest.raises(UnsupportedModuleError, match="a field 14"):
        outline(text + wire.message(14, b"x"))
    with pytest.raises(UnsupportedModuleError, match="no entry"):
        outline(b"")


# ---- what they compute -----------------------------------------------------------------------------------


def dropped(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return hidden + nn.functional.dropout(torch.relu(hidden @ weight + bias), 0.3)


def attended(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    mask = torch.ones(4, 4, dtype=torch.bool, device="xla").tril()
    scores = ((hidden @ weight) @ hidden.T).masked_fill(~mask, float("-inf"))
    return nn.functional.gelu(scores.softmax(-1) @ hidden + bias)


def sorted_rows(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    order = (hidden @ weight).argsort(-1)
    return torch.gather(hidden, -1, order) * 0.9 + bias.cumsum(0)


def halved(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return hidden + (hidden.bfloat16() @ weight.bfloat16()).float() * bias.abs().max()


def deep(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    inner = nn.functional.layer_norm(dropped(torch.tanh(hidden) * hidden.exp(), weight, bias), (WIDTH,))
    gate = inner @ weight.T > bias
    return hidden + torch.where(gate, inner.softmax(-1), (inner.bfloat16() * 2).sigmoid().float()) @ weight


@isolated
def test_layers_and_their_gradients_are_loops() -> None:
    started()
    tensors = layers(deep, 8)
    found = outlined(tensors)
    assert found is not None
    assert len(found.loops) == 2
    assert_the_same(tensors)


@isolated
@pytest.mark.parametrize("layer", [mixed, dropped, attended, sorted_rows, halved])
def test_they_compute_the_same(layer: Layer) -> None:
    started()
    # XLA rounds to bfloat16 where it writes a value, not where it fuses.
    assert_the_same(layers(layer, 8), rtol=6e-2 if layer is halved else 1e-5)


# ---- any graph -------------------------------------------------------------------------------------------

_UNARY = (torch.tanh, torch.sigmoid, torch.exp, torch.neg, torch.relu)


class _Program:
    """A random layer: a list of operations on the values there are, and how often it is repeated."""

    def __init__(self, operations: list[tuple[int, int, int]], times: int, skips: list[int]) -> None:
        self._operations = operations
        self._times = times
        self._skips = skips

    def __call__(self) -> list[torch.Tensor]:
        hidden = on_device(4, WIDTH)
        shared = on_device(4, WIDTH)
        former: list[torch.Tensor] = [shared]
        leaves = []
        for number in range(self._times):
            weight, bias = on_device(WIDTH, WIDTH), on_device(WIDTH)
            leaves += [weight, bias]
            values = [hidden, shared, bias.expand(4, WIDTH)]
            if number in self._skips:
                # One that the others do not have.
                values[1] = former[-1].cos()
            for kind, first, second in self._operations:
                one, other = values[first % len(values)], values[second % len(values)]
                values.append(self._apply(kind, one, other, weight))
            former.append(hidden)
            hidden = hidden * 0.5 + torch.tanh(values[-1])
        loss = hidden.mean()
        loss.backward()  # type: ignore[no-untyped-call]
        return [loss, hidden, *(leaf.grad for leaf in leaves if leaf.grad is not None)]

    @staticmethod
    def _apply(kind: int, one: torch.Tensor, other: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if kind < len(_UNARY):
            return torch.clamp(_UNARY[kind](one), -3, 3)
        kind -= len(_UNARY)
        if kind == 0:
            return one @ weight
        if kind == 1:
            return one * other
        if kind == 2:
            return one - other.mean(-1, keepdim=True)
        if kind == 3:
            return torch.where(one > other, one, 0.3 * other)
        if kind == 4:
            return (one.T @ other).T[:4] / 4
        return one + other


@pytest.mark.slow
@isolated(timeout=600)
def test_any_graph_computes_the_same() -> None:
    started()
    operations = st.tuples(st.integers(0, len(_UNARY) + 5), st.integers(0, 20), st.integers(0, 20))
    in_blocks = []

    @settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(st.lists(operations, min_size=6, max_size=20), st.integers(5, 9), st.lists(st.integers(0, 8), max_size=2))
    def check(layer: list[tuple[int, int, int]], times: int, skips: list[int]) -> None:
        tensors = _Program(layer, times, skips)()
        found = outlined(tensors)
        in_blocks.append(found is not None)
        if found is not None:
            assert_the_same(tensors)

    check()
    assert sum(in_blocks) > 20


# ---- graphs that are written by hand ------------------------------------------------------------------------


_LAYER = st.lists(
    st.tuples(
        st.sampled_from(["add", "multiply", "subtract", "tanh", "cosine", "dot", "constant"]), *[st.integers(0, 9)] * 2
    ),
    min_size=5,
    max_size=14,
)


def blocks_of(program: Program, outputs: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """The blocks it is taken apart into; computes the same to the last bit."""
    module = program.module(outputs)
    found = outline(module)
    if found is None:
        return ()
    for one, other in zip(run(module), run(found.module), strict=True):
        assert np.array_equal(one, other)
    return found.functions


def repeated(program: Program, layer: Callable[[int, int], int], times: int = 8) -> list[int]:
    """The output of each layer, given the one of that before and its number."""
    values = [program.parameter(4)]
    for number in range(times):
        values.append(layer(values[-1], number))
    return values[1:]


def chain(program: Program, value: int, length: int = 6) -> int:
    for step in range(length):
        value = program.apply("cosine" if step % 2 else "tanh", value)
    return value


def test_a_layer_that_would_wait_for_itself_is_none_of_them() -> None:
    """A path leaves it and comes back, far from where the search begins; the others are a block all the same."""
    program = Program()

    def layer(value: int, number: int) -> int:
        first = program.apply("add", value, program.parameter(4))
        beside = program.parameter(4)
        if number == odd:
            beside = program.apply("subtract", beside, first)
        beside = chain(program, program.apply("negate", beside))
        return chain(program, program.apply("dot", chain(program, first), beside))

    for number in range(9):
        odd = number
        program.nodes.clear()
        blocks = blocks_of(program, repeated(program, layer, 9)[-1:])
        assert blocks
        assert 6 <= blocks[0][0] <= 9


def drawn_twice() -> bytes:
    """Two calls of a computation that draws a number."""
    numbers = IdCounter()
    draw = ComputationBuilder([Node("rng", shape(4), b"", ())], numbers, ())
    draw.copy(0)
    call = Node("call", shape(4), b"", (), (0,))
    entry = ComputationBuilder([call, call, Node("subtract", shape(4), b"", (0, 1))], numbers, (50,))
    for place in range(3):
        entry.copy(place)
    computations = [draw.computation("draw.0", 50, draw.at[0], b""), entry.computation("entry.0", 60, entry.at[2], b"")]
    return written_module(computations, "entry.0", 60, b"")


def test_what_draws_numbers_is_not_the_same_twice() -> None:
    graph = parse(drawn_twice())
    assert [node.opcode for node in graph.nodes] == ["call", "call", "subtract"]
    assert not any(graph.constant)


def test_effects_that_nobody_reads_are_not_dropped() -> None:
    entry = ComputationBuilder(
        [Node("custom-call", shape(4), b"", ()), Node("constant", shape(4), b"", ())], IdCounter(), ()
    )
    entry.copy(0)
    entry.copy(1)
    module = written_module([entry.computation("entry.0", 7, entry.at[1], b"")], "entry.0", 7, b"")
    with pytest.raises(UnsupportedModuleError, match="custom-call has no result that is used"):
        parse(module)


def test_what_is_cut_off_is_not_understood() -> None:
    program = Program()
    module = program.module([chain(program, program.parameter(4))])
    inside = module.index(b"tanh")
    for end in range(1, inside, 7):
        with pytest.raises(UnsupportedModuleError):
            parse(module[:end])


def test_a_layer_that_hangs_together_otherwise() -> None:
    program = Program()

    def layer(value: int, number: int) -> int:
        first = program.apply("dot", value, program.parameter(4))
        pair = chain(program, first), chain(program, program.apply("negate", first))
        return program.apply("subtract", *(reversed(pair) if number == 3 else pair))

    assert blocks_of(program, repeated(program, layer)[-1:])


def test_values_of_other_shapes_are_not_alike() -> None:
    program = Program()

    def layer(value: int, number: int) -> int:
        first = chain(program, program.apply("dot", value, program.parameter(4)))
        beside = program.parameter(2, 2) if number == 2 else program.parameter(1, 4)
        return chain(program, program.apply("add", first, program.reshape(beside, 4)))

    assert blocks_of(program, repeated(program, layer)[-1:])


def test_other_constants_are_handed_over() -> None:
    program = Program()

    def layer(value: int, number: int) -> int:
        scaled = program.apply("multiply", program.broadcast(program.constant(number), 4), value)
        return program.apply("dot", chain(program, scaled), program.broadcast(program.constant(0.5), 4))

    assert blocks_of(program, repeated(program, layer)[-1:])


def test_what_layers_share_is_made_in_each() -> None:
    """At full size it would be written out to be handed over."""
    program = Program()
    rate = program.parameter()

    def layer(value: int, number: int) -> int:
        wide = program.apply("negate", program.broadcast(rate, 4))
        return program.apply("multiply", chain(program, program.apply("dot", value, value)), wide)

    module = program.module(repeated(program, layer)[-1:])
    found = outline(module)
    assert found is not None
    graph = parse(found.module)
    handed = [graph.nodes[operand].shape for node in graph.nodes if node.opcode == "call" for operand in node.operands]
    assert handed.count(shape()) == handed.count(shape(4)) >= 6


def test_parts_that_hang_together_alike_are_one() -> None:
    """Where a value has two users that look alike the search does not know which is which, and begins anew behind."""
    program = Program()

    def layer(value: int, number: int) -> int:
        first = program.apply("dot", value, program.parameter(4))
        wide, narrow = program.apply("add", program.apply("tanh", value), first), program.apply("tanh", first)
        wide, both = program.apply("add", wide, wide), program.apply("add", first, value)
        beside = program.apply("cosine", program.parameter(4))
        one = program.apply("dot", wide, program.apply("dot", narrow, both))
        other = program.apply("dot", narrow, program.apply("dot", wide, both))
        return program.apply("add", value, program.apply("multiply", program.apply("add", beside, one), other))

    outputs = repeated(program, layer)[-1:]
    assert len(find_regions(parse(program.module(outputs)))) == 2
    assert blocks_of(program, outputs) == ((8, 14),)


@settings(max_examples=200, deadline=None)
@given(_LAYER, st.integers(1, 100), st.permutations(range(6)))
def test_what_is_cut_in_two_is_joined(layer: list[tuple[str, int, int]], cut: int, order: list[int]) -> None:
    program = Program()
    hidden = program.parameter(4)
    for _ in order:
        values = [hidden, program.parameter(4)]
        for opcode, first, second in layer:
            one, other = values[-1 - first % len(values)], values[-1 - second % len(values)]
            both = opcode in ("add", "multiply", "subtract", "dot")
            values.append(program.apply(opcode, one, other) if both else program.apply("tanh", one))
        # All of it is read.
        for value in values[2:]:
            hidden = program.apply("maximum", hidden, value)
    graph = parse(program.module([hidden]))
    places = [place for place, node in enumerate(graph.nodes) if node.opcode not in ("parameter", "tuple")]
    size = len(places) // len(order)
    whole = [places[begin : begin + size] for begin in range(0, len(places), size)]
    cut = 1 + cut % (size - 1)
    upper, lower = [part[:cut] for part in whole], [whole[number][cut:] for number in order]
    (merged,) = merge(graph, [Region(lower), Region(upper)])
    assert sorted(sorted(part) for part in merged.occurrences) == whole
    for part in merged.occurrences:
        assert not any(set(graph.operands[place]) & set(part[at:]) for at, place in enumerate(part))


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_what_is_cut_in_three_is_joined_in_any_order(order: tuple[int, ...]) -> None:
    """Where the first and the last part would wait for themselves without the one between them."""
    program = Program()
    hidden = program.parameter(4)
    parts: list[list[list[int]]] = [[], [], []]
    for _ in range(6):
        early = program.apply("tanh", program.parameter(4))
        first = [program.apply("dot", hidden, program.parameter(4))]
        for _ in range(3):
            first.append(program.apply("tanh", first[-1]))
        between = [program.apply("cosine", first[-1])]
        for _ in range(3):
            between.append(program.apply("cosine", between[-1]))
        last = [early, program.apply("add", first[-1], between[-1])]
        last.append(program.apply("multiply", last[-1], early))
        for _ in range(3):
            last.append(program.apply("tanh", last[-1]))
        hidden = last[-1]
        for part, places in zip(parts, (first, between, last), strict=True):
            part.append(places)
    graph = parse(program.module([hidden]))
    (merged,) = merge(graph, [Region(parts[number]) for number in order])
    assert len(merged.occurrences[0]) == 14


def test_results_that_leave_some_layers_only() -> None:
    program = Program()

    def layer(value: int, number: int) -> int:
        first = chain(program, program.apply("dot", value, program.parameter(4)))
        if number in (2, 5):
            outputs.append(program.apply("negate", first))
        return chain(program, first)

    outputs: list[int] = []
    last = repeated(program, layer)[-1]
    assert blocks_of(program, [*outputs, last])


@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    _LAYER,
    st.integers(3, 8),
    st.lists(st.tuples(st.integers(0, 7), st.integers(0, 13), st.integers(0, 40)), max_size=4),
    st.lists(st.integers(0, 120), max_size=3),
)
def test_any_graph_by_hand_computes_the_same(
    layer: list[tuple[str, int, int]], times: int, others: list[tuple[int, int, int]], left: list[int]
) -> None:
    """Layers, in which a few operations read something else than those of the other layers, from anywhere before."""
    program = Program()
    shared, hidden = program.parameter(4), program.parameter(4)
    elsewhere = {(number, step): place for number, step, place in others}
    for number in range(times):
        values = [hidden, shared, program.parameter(4)]
        for step, (opcode, first, second) in enumerate(layer):
            one, other = values[-1 - first % len(values)], values[-1 - second % len(values)]
            vectors = [place for place, node in enumerate(program.nodes) if node.shape == shape(4)]
            if (number, step) in elsewhere:
                one = vectors[elsewhere[number, step] % len(vectors)]
            if opcode == "constant":
                made = program.broadcast(program.constant(second if first else number), 4)
            elif opcode in ("tanh", "cosine"):
                made = program.apply(opcode, one)
            else:
                made = program.apply(opcode, one, other)
            values.append(made)
        hidden = program.apply("tanh", values[-1])
    vectors = [place for place, node in enumerate(program.nodes) if node.shape == shape(4)]
    blocks_of(program, [hidden, *(vectors[place % len(vectors)] for place in left)])


# ---- loops ---------------------------------------------------------------------------------------------------


def loops_of(program: Program, outputs: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """As `blocks_of`, those that are loops."""
    blocks_of(program, outputs)
    found = outline(program.module(outputs))
    return () if found is None else found.loops


def there_and_back(program: Program, *, times: int = 8) -> tuple[list[int], list[int]]:
    """What layers hand on, and, the other way round, what is handed back by way of what each has read and computed."""
    weights = [program.parameter(4) for _ in range(times)]
    kept: list[tuple[int, int]] = []

    def layer(value: int, number: int) -> int:
        # Where the search begins nothing is to be seen of the ends.
        inner = chain(program, program.apply("dot", chain(program, value), weights[number]))
        kept.append((value, inner))
        return program.apply("add", value, chain(program, inner, 14))

    there = repeated(program, layer, times)
    back = [program.apply("multiply", there[-1], there[-1])]
    gradients = []
    for weight, (value, inner) in zip(reversed(weights), reversed(kept), strict=True):
        gradient = chain(program, program.apply("multiply", back[-1], inner), 12)
        gradients.append(program.apply("dot", value, gradient))
        back.append(program.apply("add", back[-1], chain(program, program.apply("dot", gradient, weight), 12)))
    return there, [back[-1], *gradients]


def opcodes(module: bytes) -> Counter[str]:
    return Counter(node.opcode for node in parse(module).nodes)


def test_layers_that_follow_each_other_are_a_loop() -> None:
    program = Program()
    there, back = there_and_back(program)
    module = program.module([there[-1], *back])
    found = outline(module)
    assert found is not None
    assert [times for times, _ in found.loops] == [8, 8]
    assert str(found.loops[0][1]) in str(found).partition("of these loops: ")[2]
    written = opcodes(found.module)
    assert (written["while"], written["dot"]) == (2, 0)
    # Weights are put together once, for both loops; a call for each turn takes gradients apart, and nothing else.
    assert (written["concatenate"], written["call"]) == (1, 8)
    for one, other in zip(run(module), run(found.module), strict=True):
        assert np.array_equal(one, other)


def test_what_a_loop_compiles_does_not_grow_with_its_turns() -> None:
    sizes = {}
    for times in (8, 32):
        program = Program()
        there, back = there_and_back(program, times=times)
        found = outline(program.module([there[-1], *back]))
        assert found is not None
        sizes[times] = len(parse(found.module).nodes)
    # A parameter, and that it is put together; a call, and what it leaves; and not the 60 instructions of a layer.
    assert sizes[32] - sizes[8] <= 24 * 5


@pytest.mark.parametrize("read", [[0], [3, 4], list(range(8))])
def test_what_some_turns_leave(read: list[int]) -> None:
    program = Program()
    there, back = there_and_back(program)
    assert len(loops_of(program, [*(there[number] for number in read), *back])) == 2


def test_layers_with_something_between_them_are_no_loop() -> None:
    """Each waits for what is computed of the one before outside of them all."""
    program = Program()

    def layer(value: int, number: int) -> int:
        for _ in range(number):
            value = program.apply("maximum", value, program.parameter(4))
        return chain(program, program.apply("dot", value, program.parameter(4)), 40)

    last = repeated(program, layer)[-1]
    assert blocks_of(program, [last])
    assert not loops_of(program, [last])


def test_few_or_small_turns_are_no_loop() -> None:
    for times, length in ((3, 40), (8, 12)):
        program = Program()
        values = repeated(
            program,
            lambda value, _, program=program, length=length: chain(  # type: ignore[misc]
                program, program.apply("dot", value, program.parameter(4)), length
            ),
            times,
        )
        assert not loops_of(program, values[-1:])


def test_turns_that_read_and_leave_much_are_no_loop() -> None:
    program = Program()
    left: list[int] = []

    def layer(value: int, number: int) -> int:
        for part in range(5):
            value = chain(program, program.apply("dot", value, program.parameter(4)), 3 + part)
            left.append(value)
        return value

    repeated(program, layer)
    assert blocks_of(program, left)
    assert not loops_of(program, left)


def test_a_turn_that_lacks_what_lies_between_the_others_is_none() -> None:
    for end in (0, 7):
        program = Program()

        def layer(value: int, number: int, program: Program = program, end: int = end) -> int:
            if number and end == 0:
                value = program.apply("maximum", value, program.parameter(4))
            value = chain(program, program.apply("dot", value, program.parameter(4)), 40)
            return program.apply("maximum", value, program.parameter(4)) if number < end else value

        assert loops_of(program, repeated(program, layer)[-1:]) == ((7, 42),)


@pytest.mark.parametrize("reads", [[2, 1, 0, -1], [2, 1, 0, -1, -1], [2, 1, 0, -1, -1, -1]])
def test_a_loop_that_reads_what_another_begins_with_more_than_once(reads: list[int]) -> None:
    program = Program()
    begin = hidden = program.parameter(4)
    there = []
    for _ in range(4):
        hidden = chain(program, program.apply("divide", hidden, program.parameter(4)), 15)
        hidden = chain(program, program.apply("dot", hidden, program.parameter(4)), 15)
        there.append(hidden)

    def roots(value: int) -> int:
        for step in range(15):
            value = program.apply("sqrt" if step % 2 else "negate", value)
        return value

    value = program.parameter(4)
    for number in reads:
        both = program.apply("add", value, begin if number < 0 else there[number])
        value = roots(program.apply("subtract", both, program.parameter(4)))
        value = roots(program.apply("dot", value, program.parameter(4)))
    assert len(loops_of(program, [value, hidden])) == 2


@pytest.mark.slow
@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.data())
def test_layers_whose_ends_differ_compute_the_same(data: st.DataObject) -> None:
    """However they are peeled: what lies between layers and their gradients may be part of either."""
    program = Program()
    times = data.draw(st.integers(5, 7))
    sizes = [data.draw(st.integers(12, 15)) for _ in range(4)]
    ends = data.draw(st.tuples(st.sampled_from([0, times - 1]), st.sampled_from([0, times - 1])))
    with_more, between = data.draw(st.integers(0, 2)), data.draw(st.integers(0, 3))
    operations = data.draw(st.lists(st.sampled_from(["dot", "maximum", "tanh", "negate"]), min_size=1, max_size=4))

    def segment(value: int, names: Sequence[str]) -> int:
        for name in names:
            given = [value] if name in ("tanh", "cosine", "sqrt", "negate") else [value, program.parameter(4)]
            value = program.apply(name, *given)
        return value

    kept = []
    hidden = program.parameter(4)
    for number in range(times):
        value = segment(hidden, [*["tanh", "cosine"] * 6, *["tanh"] * (sizes[0] - 12), "dot", *["cosine"] * sizes[1]])
        kept.append(value)
        hidden = value
        if not (with_more and number == ends[0]):
            other = program.parameter(4)
            hidden = program.apply("maximum", value, program.apply("add", value, other) if with_more == 2 else other)
    for number in reversed(range(times)):
        if number != ends[1] and between:
            beside = segment(kept[number], operations)
            pair = (beside, hidden) if between == 3 else (hidden, beside)
            hidden = (
                program.apply("subtract", hidden, program.apply("dot", *pair))
                if between == 1
                else program.apply("divide", *pair)
            )
        hidden = segment(hidden, [*["sqrt"] * sizes[2], "dot", *["negate", "sqrt"] * (sizes[3] // 2)])
    blocks_of(program, [hidden])
    # And those that nobody chose.
    module = program.module([hidden])
    graph = parse(module)
    for arrangement in peel(graph, find_regions(graph)):
        for one, other in zip(run(module), run(_Writer(graph, arrangement).module()), strict=True):
            assert np.array_equal(one, other)


def looped(
    layer: list[tuple[str, int, int]],
    backward: list[tuple[str, int, int]],
    times: int,
    others: list[tuple[int, int, int]],
    lacking: list[tuple[bool, int]],
    left: list[int],
) -> list[int]:
    """The turns of the loops that layers there and back are.

    A few operations read something else than those of other layers, and the first or the last layer lacks some.
    """
    program = Program()
    lacks = {((times - 1) * last, step) for last, step in lacking}
    shared, hidden = program.parameter(4), program.parameter(4)
    elsewhere = {(number, step): place for number, step, place in others}
    kept: list[list[int]] = []

    def vectors() -> list[int]:
        return [place for place, node in enumerate(program.nodes) if node.shape == shape(4)]

    def computed(values: list[int], operations: list[tuple[str, int, int]], number: int) -> int:
        for step, (opcode, first, second) in enumerate(operations):
            one, other = values[-1 - first % len(values)], values[-1 - second % len(values)]
            if (number, step) in elsewhere:
                one = vectors()[elsewhere[number, step] % len(vectors())]
            if (number, step) in lacks:
                values.append(one)
            elif opcode == "constant":
                values.append(program.broadcast(program.constant(second), 4))
            elif opcode in ("tanh", "cosine"):
                values.append(program.apply(opcode, one))
            else:
                values.append(program.apply(opcode, one, other))
        return program.apply("tanh", program.apply("dot", values[-1], values[0]))

    for number in range(times):
        kept.append([hidden, shared, program.parameter(4)])
        hidden = computed(kept[-1], layer, number)
    for number, values in reversed(list(enumerate(kept))):
        # Of what the layer computed only some: all would be no fewer than the instructions.
        hidden = computed(
            [hidden, values[0], values[2], values[-1], values[len(values) // 2]], backward, number + times
        )
    with pytest.MonkeyPatch.context() as patch:
        # So that layers as small as these are loops.
        patch.setattr(loops, "_SMALLEST", 1)
        patch.setattr(loops, "_INSTRUCTIONS_FOR_EACH", 0)
        found = loops_of(program, [hidden, *(vectors()[place % len(vectors())] for place in left)])
    return [turns for turns, _ in found]


@pytest.mark.slow
def test_any_layers_there_and_back_compute_the_same() -> None:
    found: Counter[int] = Counter()
    shorter = 0
    others = st.lists(st.tuples(st.integers(0, 7), st.integers(0, 13), st.integers(0, 40)), max_size=2)
    ends = st.lists(st.tuples(st.booleans(), st.integers(0, 13)), max_size=2)

    @settings(max_examples=500, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(_LAYER, _LAYER, st.integers(4, 8), others, ends, st.lists(st.integers(0, 200), max_size=3))
    def check(
        layer: list[tuple[str, int, int]],
        backward: list[tuple[str, int, int]],
        times: int,
        others: list[tuple[int, int, int]],
        ends: list[tuple[bool, int]],
        left: list[int],
    ) -> None:
        nonlocal shorter
        turns = looped(layer, backward, times, others, ends, left)
        found[len(turns)] += 1
        shorter += times - 1 in turns

    check()
    # None is no program to tell by.
    assert found[1] >= 20, found
    assert found[2] >= 5, found
    assert shorter >= 10


# ---- messages ------------------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 500), st.one_of(st.integers(0, 2**64 - 1), st.binary(max_size=300)))))
def test_messages_are_read_as_they_are_written(content: list[tuple[int, int | bytes]]) -> None:
    text = b"".join(
        wire.number(field, value) if isinstance(value, int) else wire.message(field, value) for field, value in content
    )
    found = list(wire.fields(text))
    assert [(field, value) for field, value, _ in found] == content
    assert b"".join(written for _, _, written in found) == text


@given(st.lists(st.integers(0, 2**64 - 1), min_size=1))
def test_repeated_numbers_are_read_as_they_are_written(values: list[int]) -> None:
    ((_, value, _),) = wire.fields(wire.numbers(36, values))
    assert wire.integers(value) == values


def test_what_is_no_message_is_refused() -> None:
    with pytest.raises(ValueError, match="wire type 7"):
        list(wire.fields(b"\x0f"))


@isolated
def test_what_is_compiled_in_blocks_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    started()
    with caplog.at_level(logging.INFO, "xla_adapters"):
        assert_the_same(layers(mixed, 8))
    assert "a graph is compiled in blocks: 553 instructions; outlined functions: 7 times" in caplog.text
