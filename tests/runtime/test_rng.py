"""Random numbers depend on (seed, step, micro step) and on nothing else."""

from __future__ import annotations

import functools
import io
import itertools
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import xla_adapters
from tests.isolation import isolated, run_in_child
from xla_adapters import StepSeed
from xla_adapters.runtime.rng import ReadingStream
from xla_adapters.utils.host_random import HostRandom


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


def drawn() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def read(seed: int, between: int) -> tuple[list[Any], bool]:
    """Reads three batches that draw, and draws some numbers between two of them."""
    torch.manual_seed(seed), random.seed(seed), np.random.seed(seed)
    stream, batches = ReadingStream(), []
    for _ in range(3):
        with stream.reading(epoch=1):
            batches.append(drawn())
        for _ in range(between):
            drawn()
    return batches, stream.may_have_drawn


@isolated
def test_what_reading_draws_depends_on_the_first_state_alone() -> None:
    assert read(0, 0) == read(0, 3)
    assert read(0, 0)[0] != read(1, 0)[0]
    assert len({value for batch in read(0, 0)[0] for value in batch}) == 9


@isolated
def test_reading_takes_nothing_from_the_training() -> None:
    stream = ReadingStream()
    for _ in range(2):
        with stream.reading(epoch=0):
            pass
    assert not stream.may_have_drawn
    before = HostRandom.now()
    with pytest.raises(StopIteration), stream.reading(epoch=0):
        drawn()
        raise StopIteration
    assert HostRandom.now().equals(before)
    assert stream.may_have_drawn


@isolated
def test_streams_are_saved_as_plain_values(tmp_path: Path) -> None:
    before = HostRandom.now()
    torch.save(before.to_save(), tmp_path / "random.pt")
    expected = drawn()
    assert not HostRandom.now().equals(before)
    HostRandom.of_saved(torch.load(tmp_path / "random.pt", weights_only=True)).restore()
    assert HostRandom.now().equals(before)
    assert drawn() == expected


def _draws() -> list[float]:
    return [*np.random.standard_normal(3), np.random.random_sample(), random.random(), torch.rand(1).item()]


@isolated
@pytest.mark.parametrize("generator", [None, np.random.MT19937, np.random.PCG64, np.random.Philox, np.random.SFC64])
@pytest.mark.parametrize("before", [0, 1, 2])
@pytest.mark.parametrize("after", [0, 1, 700])
def test_streams_go_on_where_they_were_put_aside(generator: Any, before: int, after: int) -> None:
    """Whatever generator numpy uses; it makes normal numbers in pairs, and keeps the second of each."""
    if generator is not None:
        np.random.set_bit_generator(generator(5))
    np.random.standard_normal(before)
    kept = HostRandom.now()
    file = io.BytesIO()
    torch.save(kept.to_save(), file)
    expected = _draws()
    file.seek(0)
    for state in (kept, HostRandom.of_saved(torch.load(file, weights_only=True))):
        np.random.standard_normal(after)
        assert not HostRandom.now().equals(state)
        state.restore()
        assert HostRandom.now().equals(state)
        assert _draws() == expected
    kept.branch(3).restore()
    drawn = _draws()
    assert drawn != expected
    kept.branch(3).restore()
    assert _draws() == drawn


@isolated
def test_streams_are_read_as_they_were_saved_before() -> None:
    np.random.standard_normal(1)
    name, keys, *rest = np.random.get_state()
    now = HostRandom.now()
    saved = {**now.to_save(), "numpy": (name, torch.from_numpy(keys.astype(np.int64)), *rest)}
    assert HostRandom.of_saved(saved).equals(now)


def _drawn(seed: int | None) -> list[float]:
    """What a process draws on the device, by itself and in a step."""
    if seed is not None:
        torch.manual_seed(seed)
    xla_adapters.initialize()
    outside = torch.rand(3, device="xla").tolist()
    with xla_adapters.step():
        inside = torch.nn.functional.dropout(torch.ones(16, device="xla"))
    return [*outside, *inside.tolist()]


def test_torchs_seed_before_the_runtime_starts_is_the_devices() -> None:
    first, second, unseeded = (run_in_child(functools.partial(_drawn, seed)) for seed in (1, 2, None))
    assert first == run_in_child(functools.partial(_drawn, 1))
    assert first[:3] != second[:3]
    assert first[3:] != second[3:]
    assert unseeded[:3] not in (first[:3], second[:3])


@isolated
@pytest.mark.parametrize("seed", [3, -3, 2**64 - 1])
def test_torchs_seed_is_the_devices(seed: int) -> None:
    def both() -> list[list[float]]:
        torch.manual_seed(seed)
        outside = torch.rand(3, device="xla").tolist()
        with xla_adapters.step():
            inside = torch.nn.functional.dropout(torch.ones(16, device="xla"))
        return [outside, inside.tolist(), torch.rand(3).tolist()]

    xla_adapters.initialize()
    first = both()
    with xla_adapters.count() as counted:
        assert both() == first
    assert counted.compiles == 0
    torch.manual_seed(seed)
    assert torch.rand(3, device="xla").tolist() == first[0]
    torch.manual_seed(4)
    assert torch.rand(3, device="xla").tolist() != first[0]
    torch.seed()
    assert torch.rand(3, device="xla").tolist() != first[0]


@isolated
def test_torchs_seed_in_a_step() -> None:
    xla_adapters.initialize()
    for _ in range(2):
        with xla_adapters.step():
            torch.manual_seed(7)
            first = torch.rand(3, device="xla")
            torch.manual_seed(7)
            second = torch.rand(3, device="xla")
        assert first.tolist() == second.tolist()


def _seeded(worker: int) -> None:
    torch.manual_seed(worker)


@isolated
def test_torchs_seed_in_a_forked_worker() -> None:
    xla_adapters.initialize()
    torch.manual_seed(1)
    loader = torch.utils.data.DataLoader(
        list(range(4)), batch_size=2, num_workers=1, worker_init_fn=_seeded, multiprocessing_context="fork"
    )
    before = xla_adapters.get_runtime().random.seed()
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3]]
    assert xla_adapters.get_runtime().random.seed() == before
