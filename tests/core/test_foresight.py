"""Updates that are computed ahead: for as long as nothing that they depend on changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from tests.core.replay_twins import Twin, assert_twins
from tests.isolation import isolated
from xla_adapters.replay.foresight import Foresight, Update


class Plays:
    """Counts on by one, and notes for which settings and after which count each update was computed."""

    def __init__(self, optimizer: torch.optim.Optimizer, *, has_more: bool = False) -> None:
        self.optimizer = optimizer
        self.has_more = has_more
        self.present = torch.tensor(0.0)
        self.calls = 0
        self.foresight = Foresight(self.play)

    def play(self, counts: Sequence[torch.Tensor] | None) -> Update:
        self.calls += 1
        before = self.present if counts is None else counts[0]
        numbers = (float(before) + 1, float(self.optimizer.param_groups[0]["lr"]))
        after = None if self.has_more else (before + 1,)
        return Update(numbers=numbers, operators=(), advance=lambda: None, counts=after)

    def step(self, *, ahead: bool = True) -> tuple[float, ...]:
        update = self.foresight.next(self.optimizer, [self.present if ahead else None])
        self.present = self.present + 1 if update.counts is None else update.counts[0]
        return update.numbers


@pytest.fixture
def plays() -> Plays:
    return Plays(torch.optim.SGD([torch.zeros(1)], lr=0.5))


def test_several_are_computed_at_once(plays: Plays) -> None:
    assert [plays.step() for _ in range(20)] == [(number + 1.0, 0.5) for number in range(20)]
    # The first alone, for nothing is known to stay; each ninth then, with eight more.
    assert plays.calls == 1 + 9 + 9 + 9
    calls = plays.calls
    for _ in range(8):
        plays.step()
    assert plays.calls == calls


def test_other_settings_are_seen_at_once(plays: Plays) -> None:
    for _ in range(4):
        plays.step()
    plays.optimizer.param_groups[0]["lr"] = 0.25
    assert plays.step() == (5.0, 0.25)
    plays.optimizer.param_groups[0]["more"] = 1
    assert plays.step() == (6.0, 0.25)


def test_a_rate_that_changes_each_time_computes_nothing_for_nobody(plays: Plays) -> None:
    for number in range(6):
        plays.optimizer.param_groups[0]["lr"] = 0.5 / (number + 1)
        plays.step()
    assert plays.calls == 6


def test_counts_that_somebody_changed(plays: Plays) -> None:
    for _ in range(4):
        plays.step()
    plays.present = torch.tensor(40.0)
    assert plays.step() == (41.0, 0.5)
    assert plays.step() == (42.0, 0.5)


def test_counts_that_somebody_reads_each_time(plays: Plays) -> None:
    assert [plays.step(ahead=False)[0] for _ in range(6)] == [1, 2, 3, 4, 5, 6]
    assert plays.calls == 6


def test_an_update_that_changes_more_than_counts() -> None:
    plays = Plays(torch.optim.SGD([torch.zeros(1)], lr=0.5), has_more=True)
    assert [plays.step()[0] for _ in range(6)] == [1, 2, 3, 4, 5, 6]
    assert plays.calls == 6


@pytest.mark.parametrize("value", [torch.tensor(0.5), np.zeros(3), (torch.tensor(0.9), 0.99), object()], ids=type)
def test_settings_that_cannot_be_compared(value: Any, plays: Plays) -> None:
    plays.optimizer.param_groups[0]["of a kind"] = value
    for _ in range(6):
        plays.step()
    assert plays.calls == 6


@pytest.mark.parametrize("value", [[1, 2], ([1, 2], 3)])
def test_settings_that_are_changed_in_place(value: Any, plays: Plays) -> None:
    plays.optimizer.param_groups[0]["list"] = value
    for _ in range(4):
        plays.step()
    calls = plays.calls
    plays.step()
    assert plays.calls == calls
    (value if isinstance(value, list) else value[0])[0] = 3
    plays.step()
    assert plays.calls == calls + 1


def test_names_of_parameters_are_no_obstacle() -> None:
    plays = Plays(torch.optim.AdamW([("weight", torch.zeros(1))], betas=(0.9, 0.99)))
    assert "param_names" in plays.optimizer.param_groups[0]
    for _ in range(10):
        plays.step()
    assert plays.calls == 10
    plays.step()
    assert plays.calls == 10 + 9


def _halved(twin: Twin, number: int) -> Any:
    return 0.05 / (1 + number // 3)


def _of_numpy(twin: Twin, number: int) -> Any:
    return np.float64(0.05) if number < 6 else np.float64(0.0)


def _short_of_numpy(twin: Twin, number: int) -> Any:
    return np.float32(0.05) if number < 6 else np.float32(0.001)


@pytest.mark.parametrize("rate", [_halved, _of_numpy, _short_of_numpy], ids=lambda rate: rate.__name__)
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.NAdam, torch.optim.Adagrad])
@isolated
def test_rates_over_many_steps(kind: type[torch.optim.Optimizer], rate: Callable[[Twin, int], Any]) -> None:
    def run(twin: Twin) -> None:
        for number in range(24):
            twin.optimizer.param_groups[0]["lr"] = rate(twin, number)
            twin.run(1)
            if number == 17:
                # Reading changes nothing.
                [value.tolist() for state in twin.optimizer.state.values() for value in state.values()]

    options = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    assert_twins(run, replays=22, optimizer=kind, **options)
