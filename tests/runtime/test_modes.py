"""The process is eager after `initialize()`, and steps are compiled all the same."""

from __future__ import annotations

import torch

import xla_adapters
from tests.isolation import isolated


@isolated
def test_operations_execute_at_once_after_initialize() -> None:
    xla_adapters.initialize()
    tensor = torch.ones(3).to("xla")
    with xla_adapters.count() as counters:
        tensor = tensor + 1
    assert (counters.eager_ops, counters.executions) == (1, 0)
    with xla_adapters.count() as counters, xla_adapters.step():
        tensor = (tensor + 1) * 2
    assert (counters.eager_ops, counters.executions) == (0, 1)
    assert xla_adapters.get_runtime().tracing.eager()
    assert tensor.tolist() == [6, 6, 6]


@isolated
def test_the_mode_is_left_as_it_is_if_asked() -> None:
    xla_adapters.initialize(eager=False)
    tensor = torch.ones(3).to("xla")
    with xla_adapters.count() as counters:
        tensor = tensor + 1
    assert counters.eager_ops == 0
    xla_adapters.initialize()
    xla_adapters.initialize(eager=False)
    assert xla_adapters.get_runtime().tracing.eager()
