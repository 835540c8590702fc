"""Weights that callbacks copy and put back train as on the host, and cost the usual loop nothing."""

from __future__ import annotations

from typing import Any

import pytest

from tests.hf_trainer.scenarios import assert_close, vector_samples
from tests.replay.averages import WAYS, Averages, counting_looks
from tests.trainers import Moment, Training, each_trainer, train
from xla_adapters import XLAConfig

pytestmark = pytest.mark.isolated


def _averaging(kind: str, way: str, **options: Any) -> tuple[Training, Averages]:
    made: list[Averages] = []

    def begin(moment: Moment) -> None:
        if not made:
            made.append(Averages(moment.model, way))

    at: dict[str, Any] = {"step begin": begin, "step end": lambda moment: made[0].batch_ended(moment.step - 1)}
    given: dict[str, Any] = {"data": vector_samples(32), "evaluate_every": 4, "at": at, **options}
    return train(kind, **given), made[0]


@each_trainer
@pytest.mark.parametrize(
    "way", [way if way in ("copy_", "AveragedModel") else pytest.param(way, marks=pytest.mark.slow) for way in WAYS]
)
def test_weights_that_callbacks_put_back_train_as_on_the_host(kind: str, way: str) -> None:
    for optimizer, rate in (("adamw", 1e-2), ("sgd", 0.1)):
        expected, plain = _averaging(kind, way, on_cpu=True, optimizer=optimizer, rate=rate)
        for replay in ("auto", False):
            run, mine = _averaging(kind, way, optimizer=optimizer, rate=rate, step_replay=replay)
            assert_close(run.losses, expected.losses)
            assert_close(run.evaluations, expected.evaluations)
            assert_close(mine.values(), plain.values(), 2e-5)
            assert (run.program.replays > 0) == (replay == "auto")


@each_trainer
@pytest.mark.parametrize("replay", ["auto", False])
def test_the_usual_loop_looks_at_the_state_once(kind: str, replay: Any, tmp_path: Any) -> None:
    """A computed average, logs, evaluations and checkpoints do not count as copies of the weights."""
    # Steps that verify replays are traced, and traced steps look.
    options: dict[str, Any] = {"config": XLAConfig(step_replay=replay, replay_verify_every=None)}
    # Lightning evaluates at the end of each of two epochs, and saves nothing.
    hf = {"steps": 24, "evaluate_every": 8, "folder": tmp_path, "save_every": 8}
    with counting_looks() as looks:
        _averaging(kind, "", **(hf if kind == "hf" else {"steps": 10, "evaluate_every": 5}), **options)
    assert looks["first"].call_count <= 1
    assert looks["live"].call_count <= 3
    assert looks["copies"].call_count <= (6 if kind == "hf" else 4)
    assert looks["state"].call_count <= 7


@each_trainer
@pytest.mark.parametrize("accumulation", [1, 2])
def test_steps_that_are_not_logged_look_at_no_live_tensors(kind: str, accumulation: int) -> None:
    """Replays write the sum of losses and the gradients, and no user code copies these."""
    options: dict[str, Any] = {"stock": {"logging_steps": 100}} if kind == "hf" else {}
    with counting_looks() as looks:
        config = XLAConfig(replay_verify_every=None)
        run = train(kind, steps=20, data=vector_samples(160), accumulate=accumulation, config=config, **options)
    assert run.program.replays >= 12 * accumulation
    assert looks["every"].call_count <= 8 * accumulation
