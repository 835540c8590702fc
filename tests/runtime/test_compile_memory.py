"""The memory that an executable needs, by kind, from what torch_xla writes at a compile."""

from __future__ import annotations

import os

import torch
from torch import nn

import xla_adapters
from tests.isolation import isolated
from xla_adapters import CompiledStep
from xla_adapters.tracing.compile_events import CompileEvent

_FLOAT = 4
# What torch_xla writes is rounded to millionths of a GiB.
_ROUNDED = 1100


def _compiled() -> list[CompileEvent]:
    model = nn.Linear(256, 512).to("xla")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @CompiledStep
    def train_step(inputs: torch.Tensor) -> None:
        (model(inputs).exp().t() @ model(inputs).sin()).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    for size in (64, 64, 64, 32):
        train_step(torch.randn(size, 256))
    return train_step.events


@isolated
def test_memory_by_kind() -> None:
    xla_adapters.initialize()
    events = _compiled()
    assert len(events) == 2
    for event, size in zip(events, (64, 32), strict=True):
        memory, graph = event.memory, event.graph
        assert memory is not None
        assert graph is not None
        weights = (256 * 512 + 512) * _FLOAT
        assert abs(memory.inputs - weights - size * 256 * _FLOAT) < _ROUNDED
        assert abs(memory.outputs - graph.output_bytes) < _ROUNDED
        assert abs(memory.aliased - weights) < _ROUNDED
        # At least the two results of the exponential and the sine are there at once.
        assert memory.temporaries > 2 * size * 512 * _FLOAT
        assert memory.total == memory.inputs + memory.outputs - memory.aliased + memory.temporaries + memory.code


@isolated
def test_who_looks_at_what_torch_xla_writes_gets_it() -> None:
    os.environ["PT_XLA_DEBUG_FILE"] = os.devnull
    xla_adapters.initialize()
    assert [event.memory for event in _compiled()] == [None, None]
    assert os.environ["PT_XLA_DEBUG_FILE"] == os.devnull
    assert "PT_XLA_DEBUG_LEVEL" not in os.environ


@isolated
def test_what_a_process_inherits_is_not_the_users() -> None:
    os.environ["PT_XLA_DEBUG_FILE"], os.environ["PT_XLA_DEBUG_LEVEL"] = "/proc/1/fd/77", "1"
    xla_adapters.initialize()
    assert all(event.memory is not None for event in _compiled())
