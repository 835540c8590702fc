"""The counts are those of the code inside."""

from __future__ import annotations

import pytest
import torch

import xla_adapters
from tests.isolation import isolated
from xla_adapters.run_stats import RunStats


@isolated
def test_counts_by_kind() -> None:
    xla_adapters.initialize()
    tensor = torch.ones(3).to("xla")
    with xla_adapters.count() as lazy:
        assert (tensor * 2.5).sum().item() == 7.5
    assert (lazy.compiles, lazy.executions, lazy.transfers_to_host, lazy.eager_ops) == (1, 1, 1, 0)
    with xla_adapters.eager(), xla_adapters.count() as eager:
        result = tensor + tensor
    assert (eager.compiles, eager.executions, eager.eager_ops, eager.eager_compiles) == (0, 0, 1, 1)
    assert result.tolist() == [2, 2, 2]
    assert lazy.compile_seconds > 0 < lazy.wall_seconds
    assert set(lazy.as_dict()) >= {"compiles", "executions", "transfers_to_host", "eager_ops", "host_seconds"}


@isolated
def test_counts_are_there_when_the_body_raises() -> None:
    xla_adapters.initialize()
    tensor = torch.ones(3).to("xla")

    def fails() -> None:
        (tensor * 2.5).sum().item()
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"), xla_adapters.count() as counters:
        fails()
    assert counters.executions == 1


@isolated
def test_run_stats_summary() -> None:
    now = [0.0]
    stats = RunStats(clock=lambda: now[0])
    assert stats.summary() == "nothing was run"
    stats.start()
    tensor = torch.ones(3).to("xla")
    for _ in range(2):
        (tensor * 2.5).sum().item()
        stats.count_batch(samples=4, tokens=40)
        stats.count_step()
    now[0] = 1e6
    stats.stop()
    totals = stats.as_dict()
    assert (totals["steps"], totals["compiles"], totals["executions"]) == (2, 1, 2)
    assert totals["executions_per_step"] == 1
    assert totals["tokens_per_second"] == pytest.approx(80 / 1e6, rel=1e-3)
    summary = stats.summary()
    assert "2 (1.00 per step)" in summary
    assert "tokens/s" in summary
