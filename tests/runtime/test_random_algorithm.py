"""`rng_algorithm`: what draws random numbers on the device, the same ones in each run and over a resume."""

from __future__ import annotations

import functools
import logging
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import xla_adapters
from tests.isolation import isolated, run_in_child
from tests.replay.replay_twins import Twin
from xla_adapters import CompiledStep, ConfigError, StepSeed, XLAConfig
from xla_adapters.checkpoint import TrainingState
from xla_adapters.errors import RandomAlgorithmWarning
from xla_adapters.runtime.random_algorithm import use_random_algorithm

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
    twin = Twin("auto")
    if resumes:
        state: dict[str, Any] = torch.load(folder / "state.pt")
        twin.model.load_state_dict(state["model"])
        twin.optimizer.load_state_dict(state["optimizer"])
        twin.passes = state["passes"]
        training = TrainingState.load(folder)
        assert training is not None
        training.restore()
    twin.run(passes)
    if saves:
        state = {"model": twin.model.state_dict(), "optimizer": twin.optimizer.state_dict(), "passes": twin.passes}
        torch.save(
            {**state, "model": {name: value.cpu() for name, value in state["model"].items()}}, folder / "state.pt"
        )
        TrainingState.capture().save(folder)
    return [float(loss) for loss in twin.losses]


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
