"""Values that steps write in place, and that nobody annotated: one graph for the first step and the later ones."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import xla_adapters
from tests.isolation import isolated
from tests.support import Loop
from xla_adapters.runtime.transfers import uploading
from xla_adapters.sharding import Mesh
from xla_adapters.sharding.mesh import tiles_of

STEPS = 4


def _uploaded(value: torch.Tensor) -> torch.Tensor:
    with uploading():
        return value.to("xla")


_COPIES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "to": lambda value: value.to("xla"),
    "uploading": _uploaded,
    "to_device": lambda value: xla_adapters.get_runtime().transfers.to_device(value),
}


@isolated(env={"CPU_NUM_DEVICES": "4"})
@pytest.mark.parametrize("copy", _COPIES)
@pytest.mark.parametrize("shape", [(), (1,), (3,)], ids=str)
def test_a_running_sum(copy: str, shape: tuple[int, ...]) -> None:
    xla_adapters.initialize(spmd=True)
    rows = torch.arange(8 * 3.0).reshape(8, 3)
    batch = _uploaded(rows)
    xla_adapters.get_runtime().spmd.shard(batch, tiles_of(Mesh(shape=(4,), axis_names=("data",)), ("data", None)))
    total = _COPIES[copy](torch.zeros(shape))
    with xla_adapters.count() as counts:
        for _ in range(STEPS):
            with xla_adapters.step(name="sum"):
                total += batch.mean(0) if shape == (3,) else batch.mean()
    assert (counts.compiles, counts.executions) == (1, STEPS)
    assert torch.equal(total.cpu(), (STEPS * (rows.mean(0) if shape == (3,) else rows.mean())).expand(shape))


@isolated(env={"CPU_NUM_DEVICES": "4"})
def test_a_model_without_annotations() -> None:
    xla_adapters.initialize(spmd=True)
    loop = Loop()
    # torch_xla makes a constant of a zero that is read before it is written, with SPMD or without.
    loop.model.rebound = xla_adapters.get_runtime().transfers.to_device(torch.zeros(()))
    with xla_adapters.count() as counts:
        for _ in range(STEPS):
            with xla_adapters.step(name="train"):
                loop.body()
    assert (counts.compiles, counts.executions) == (1, STEPS)
