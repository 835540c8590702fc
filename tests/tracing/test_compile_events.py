"""What is noted of each compile, and that noting it compiles, executes and transfers nothing."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import xla_adapters
from tests.device import DEVICE
from xla_adapters import CompiledStep, StepProgram, XLAConfig
from xla_adapters.tracing.compile_events import CompileEvent, listening

pytestmark = pytest.mark.isolated

ROWS, WIDTH, HIDDEN, CLASSES = 8, 16, 32, 4
# Forward, and the gradients of both weights and of the hidden values.
FLOPS = 2 * ROWS * (WIDTH * HIDDEN * 2 + HIDDEN * CLASSES * 3)


def _training() -> tuple[nn.Module, CompiledStep[torch.Tensor]]:
    xla_adapters.initialize()
    model = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, CLASSES)).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters())

    def step(rows: torch.Tensor) -> torch.Tensor:
        loss = model(rows).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return model, CompiledStep(step, config=XLAConfig(replay_verify_every=None))


def test_each_compile_says_what_its_graph_needs() -> None:
    model, step = _training()
    heard: list[CompileEvent] = []
    with listening(heard.append):
        for rows in (ROWS, ROWS, ROWS, ROWS // 2):
            step(torch.randn(rows, WIDTH))
    first, second = step.events
    assert heard == [first, second]
    weights = sum(parameter.numel() for parameter in model.parameters())
    assert first.graph is not None
    assert second.graph is not None
    assert (first.step, first.call, second.call, first.phase) == ("step", 1, 4, "step")
    assert first.line.startswith(f"{__file__}:")
    assert first.seconds > 0 < first.graph.operations
    # Parameters, two moments of each, and a count of each.
    assert (first.graph.parameters, first.graph.parameter_bytes) == (4, 4 * weights)
    assert (first.graph.donated, first.graph.donated_bytes) == (3 * 4, 3 * 4 * weights)
    assert first.graph.input_bytes >= 4 * (3 * weights + ROWS * WIDTH)
    assert first.graph.output_bytes == 4 * (3 * weights + 1)
    assert (first.graph.flops, second.graph.flops) == (FLOPS, FLOPS // 2)
    assert first.graph.hash != second.graph.hash
    assert "(8, 16) float32 -> (4, 16) float32" in second.reason
    assert json.loads(json.dumps(second.as_dict()))["graph"]["flops"] == FLOPS // 2
    assert f"{FLOPS:,} FLOPs" in str(first)


def test_flops_of_replayed_calls_are_those_of_their_graph() -> None:
    _, step = _training()
    for _ in range(5):
        step(torch.randn(ROWS, WIDTH))
    assert step.replays > 0
    assert (step.program.flops, step.program.without_flops) == (5 * FLOPS, 0)


def test_looking_at_graphs_compiles_and_executes_nothing() -> None:
    _, step = _training()
    # A self-test, which compiles.
    assert xla_adapters.get_runtime().replay_works
    with xla_adapters.count() as counted:
        for _ in range(4):
            step(torch.randn(ROWS, WIDTH))
    assert (counted.compiles, counted.executions, counted.eager_ops) == (1, 4, 0)


def test_a_step_that_is_synced_is_looked_at_too() -> None:
    xla_adapters.initialize()
    layer = nn.Conv2d(3, 8, 3, stride=2).to(DEVICE)
    program = StepProgram("train", XLAConfig())
    for size in (9, 9, 11):
        pixels = torch.randn(2, 3, size, size).to(DEVICE)
        program.open(inputs=pixels)
        layer(pixels).square().mean().backward()
        program.close()
        layer.zero_grad()
    assert [event.call for event in program.events] == [1, 3]
    graphs = [event.graph for event in program.events]
    assert all(graph is not None and graph.donated is None for graph in graphs)
    # Forward and the gradient of the kernel.
    expected = [2 * 2 * (2 * 8 * out * out) * 3 * 3 * 3 for out in (4, 5)]
    assert [graph.flops for graph in graphs if graph is not None] == expected
    assert program.flops == 2 * expected[0] + expected[1]


def test_a_listener_is_told_until_it_leaves() -> None:
    _, step = _training()
    heard: list[CompileEvent] = []
    with pytest.raises(ValueError, match="out"), listening(heard.append):
        step(torch.randn(ROWS, WIDTH))
        raise ValueError("out")
    step(torch.randn(ROWS + 1, WIDTH))
    assert (len(heard), len(step.events)) == (1, 2)
