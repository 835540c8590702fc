"""Random numbers depend on (seed, step, micro step) and on nothing else."""

from __future__ import annotations

import itertools

import torch

import xla_adapters
from tests.isolation import isolated, run_in_child
from xla_adapters import StepSeed


def test_every_coordinate_counts() -> None:
    values = {
        StepSeed(seed=seed, step=step, micro_step=micro, replica=replica, stream=stream).value()
        for seed, step, micro, replica, stream in itertools.product(range(4), repeat=5)
    }
    assert len(values) == 4**5
    assert all(0 <= value < 2**63 for value in values)
    assert StepSeed(seed=-1, step=0).value() != StepSeed(seed=1, step=0).value()


def masks(steps: list[StepSeed]) -> list[list[float]]:
    """The dropout masks that steps with these seeds draw."""
    batch = torch.ones(64).to("xla")
    drawn = []
    with xla_adapters.eager():
        for seed in steps:
            with xla_adapters.step(seed=seed):
                mask = torch.nn.functional.dropout(batch, 0.5)
            drawn.append(mask.tolist())
    return drawn


def seeds() -> list[StepSeed]:
    return [StepSeed(seed=1, step=step, micro_step=micro) for step in range(2) for micro in range(2)]


@isolated
def test_masks_repeat_in_one_process_and_never_recompile() -> None:
    first = masks(seeds())
    assert len({tuple(mask) for mask in first}) == 4
    with xla_adapters.count() as counters:
        assert masks(list(reversed(seeds()))) == list(reversed(first))
    assert counters.compiles == 0


def test_masks_repeat_in_a_new_process() -> None:
    assert run_in_child(lambda: masks(seeds())) == run_in_child(lambda: masks(seeds()))
