"""Random numbers per step, and the algorithm that they are drawn with."""

from __future__ import annotations

import functools
import io
import itertools
import logging
import os
import random
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import xla_adapters
from tests.isolation import isolated, run_in_child
from tests.replay.with_and_without_replay import TrainedStep
from xla_adapters import CompiledStep, ConfigError, StepSeed, XLAConfig
from xla_adapters.checkpoint import TrainingState
from xla_adapters.errors import RandomAlgorithmWarning
from xla_adapters.runtime.rng import use_random_algorithm
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


# ---- the algorithm --------------------------------------------------------------------------------


_VARIABLE = "XLA_RNG_BIT_GENERATOR"


def _masks(algorithm: str = "auto", **environment: str) -> tuple[list[float], str, tuple[int, int, int]]:
    """What three steps draw, by what, and what they cost; in a process of their own."""
    return run_in_child(functools.partial(_draw, algorithm), env=environment)  # type: ignore[no-any-return]


def _draw(algorithm: str) -> tuple[list[float], str, tuple[int, int, int]]:
    config = XLAConfig(rng_algorithm=algorithm)  # type: ignore[arg-type]
    passes = iter(range(9))
    step = CompiledStep(
        lambda batch: torch.nn.functional.dropout(batch, 0.5),
        config=config,
        seed=lambda: StepSeed(seed=1, step=next(passes)),
    )
    batch = torch.ones(8)
    assert xla_adapters.get_runtime().replay_works
    with xla_adapters.count() as counters:
        drawn = [step(batch) for _ in range(3)]
    values = [float(value) for mask in drawn for value in mask.cpu()]
    costs = (counters.compiles, counters.executions, counters.eager_ops)
    return values, xla_adapters.get_runtime().random.algorithm(), costs


def test_each_draws_its_own_numbers_at_the_same_counts() -> None:
    found = {name: _masks(name) for name in ("auto", "default", "philox", "three_fry")}
    assert {name: algorithm for name, (_, algorithm, _) in found.items()} == {
        "auto": "three_fry",
        "default": "default",
        "philox": "philox",
        "three_fry": "three_fry",
    }
    assert found["auto"] == found["three_fry"] == _masks("three_fry")
    masks = [found[name][0] for name in ("default", "philox", "three_fry")]
    assert all(masks.count(mask) == 1 for mask in masks)
    assert len({costs for _, _, costs in found.values()}) == 1
    assert found["auto"][2][1] == 3


def test_the_variable_of_the_user_wins() -> None:
    assert _masks(XLA_RNG_BIT_GENERATOR="philox") == _masks("philox")


@isolated(env={_VARIABLE: "philox"})
def test_an_option_against_the_variable_is_told() -> None:
    with pytest.warns(RandomAlgorithmWarning, match="drawn by philox, not by three_fry: XLA_RNG_BIT_GENERATOR=philox"):
        assert use_random_algorithm(XLAConfig(rng_algorithm="three_fry")) == "philox"
    assert os.environ[_VARIABLE] == "philox"


@isolated(env={_VARIABLE: "mersenne"})
def test_a_variable_that_torch_xla_does_not_know() -> None:
    with pytest.raises(ConfigError, match="'mersenne' is not a valid value; valid values: default, philox, three_fry"):
        use_random_algorithm(XLAConfig())


@isolated
def test_an_option_that_comes_too_late_is_told() -> None:
    xla_adapters.initialize()
    float(torch.rand(1, device="xla"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert use_random_algorithm(XLAConfig()) == "default"
    with pytest.warns(RandomAlgorithmWarning, match="not by three_fry: numbers were drawn, or a step lowered, before"):
        use_random_algorithm(XLAConfig(rng_algorithm="three_fry"))


@isolated
def test_what_is_chosen_is_logged_once() -> None:
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("xla_adapters")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    for _ in range(2):
        use_random_algorithm(XLAConfig())
    assert [message for message in messages if "three_fry" in message] == [
        "random numbers on the device are drawn by three_fry (XLA_RNG_BIT_GENERATOR was set to that while it was read)"
    ]


def test_unknown_values_list_the_valid_ones() -> None:
    with pytest.raises(ConfigError, match="valid values: 'auto', 'default', 'philox', 'three_fry'"):
        XLAConfig(rng_algorithm="xorshift")  # type: ignore[arg-type]


def _train(folder: Path, *, passes: int, resumes: bool = False, saves: bool = False) -> list[float]:
    trained = TrainedStep("auto")
    if resumes:
        state: dict[str, Any] = torch.load(folder / "state.pt")
        trained.model.load_state_dict(state["model"])
        trained.optimizer.load_state_dict(state["optimizer"])
        trained.passes = state["passes"]
        training = TrainingState.load(folder)
        assert training is not None
        training.restore()
    trained.run(passes)
    if saves:
        state = {
            "model": trained.model.state_dict(),
            "optimizer": trained.optimizer.state_dict(),
            "passes": trained.passes,
        }
        torch.save(
            {**state, "model": {name: value.cpu() for name, value in state["model"].items()}}, folder / "state.pt"
        )
        TrainingState.capture().save(folder)
    return [float(loss) for loss in trained.losses]


def test_a_resumed_run_goes_on_with_the_algorithm_of_the_first(tmp_path: Path) -> None:
    whole = run_in_child(lambda: _train(tmp_path, passes=6), env={_VARIABLE: "philox"})
    first = run_in_child(lambda: _train(tmp_path, passes=3, saves=True), env={_VARIABLE: "philox"})
    rest = run_in_child(lambda: _train(tmp_path, passes=3, resumes=True))
    assert whole == first + rest

    def otherwise() -> None:
        with pytest.warns(
            RandomAlgorithmWarning, match="drew random numbers on the device by philox, this one .* default"
        ):
            _train(tmp_path, passes=1, resumes=True)

    run_in_child(otherwise, env={_VARIABLE: "default"})
