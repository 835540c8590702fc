"""A small net, its batch and job, for tests."""

from __future__ import annotations

from importlib import util

import pytest
import torch
from torch import nn

from xla_adapters.preflight.job import StepJob, adamw
from xla_adapters.sharding import Mesh, ShardingPlan, template

ROWS, WIDTH = 16, 128
needs_libtpu = pytest.mark.skipif(
    util.find_spec("libtpu") is None or util.find_spec("pypjrt") is None,
    reason='libtpu or pypjrt is not installed: pip install "xla-adapters[preflight]"',
)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH, bias=False)
        self.norm, self.drop = nn.LayerNorm(WIDTH), nn.Dropout(0.1)

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.norm(inputs + self.drop(self.down(torch.relu(self.up(inputs)))))
        return {"loss": nn.functional.cross_entropy(hidden, labels)}


def batch(rows: int = ROWS, device: str = "cpu") -> dict[str, torch.Tensor]:
    return {
        "inputs": torch.zeros(rows, WIDTH, device=device),
        "labels": torch.zeros(rows, dtype=torch.long, device=device),
    }


def net() -> Net:
    with torch.device("meta"):
        return Net()


def factory(rows: int, length: int | None) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """What `--model tests.preflight.nets:factory` calls."""
    return Net(), {"inputs": torch.empty(rows, WIDTH), "labels": torch.empty(rows, dtype=torch.long)}


def plan_of(scheme: str, *shape: int) -> ShardingPlan:
    return template(scheme, net(), Mesh.data_and_model(*shape))


def job(plan: ShardingPlan, *, rows: int = ROWS) -> StepJob:
    return StepJob(model=net(), batch=batch(rows, "meta"), plans=(plan,), optimizer=adamw)
