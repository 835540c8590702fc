"""Callbacks that keep copies of the weights and put them back."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import TrainerCallback

from tests.hf_trainer.scenarios import Classifier, arguments, assert_close, ours, reference, steps_of, vector_samples
from tests.isolation import isolated
from tests.replay.averages import WAYS, Averages, counting_looks
from xla_adapters import XLAConfig


class _Callback(TrainerCallback):
    averages: Averages

    def __init__(self, way: str) -> None:
        self.way = way

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.averages = Averages(model, self.way)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.averages.batch_ended(state.global_step - 1)


def _options(optimizer: str = "adamw_torch", **further: Any) -> dict[str, Any]:
    return {"max_steps": 8, "eval_strategy": "steps", "eval_steps": 4, "optim": optimizer, **further}


@pytest.mark.parametrize(
    "way", [way if way in ("copy_", "AveragedModel") else pytest.param(way, marks=pytest.mark.slow) for way in WAYS]
)
@isolated
def test_weights_that_callbacks_put_back_train_as_on_the_host(way: str) -> None:
    data = vector_samples(32)
    for optimizer in ("adamw_torch", "sgd"):
        plain = _Callback(way)
        expected = reference(
            Classifier(), data, args=_options(optimizer), eval_dataset=vector_samples(8), callbacks=[plain]
        )
        for replay in ("auto", False):
            mine = _Callback(way)
            run = ours(
                Classifier(),
                data,
                args=arguments(**_options(optimizer)),
                eval_dataset=vector_samples(8),
                callbacks=[mine],
                step_replay=replay,
            )
            assert_close(run.losses, expected.losses)
            assert_close(run.logged("eval_loss"), expected.logged("eval_loss"))
            assert_close(mine.averages.values(), plain.averages.values(), 2e-5)
            assert (steps_of(run.trainer).train.replays > 0) == (replay == "auto")


@pytest.mark.parametrize("replay", ["auto", False])
@isolated
def test_the_usual_loop_looks_at_the_state_once(replay: Any) -> None:
    """A computed average, logs, evaluations and checkpoints do not count as copies of the weights."""
    with counting_looks() as looks:
        ours(
            Classifier(),
            vector_samples(64),
            args=arguments(**_options(max_steps=24, eval_steps=8, save_strategy="steps", save_steps=8)),
            eval_dataset=vector_samples(8),
            callbacks=[_Callback("")],
            # Steps that verify replays are traced, and traced steps look.
            xla_args=XLAConfig(step_replay=replay, replay_verify_every=None),
        )
    assert looks["first"].call_count <= 1
    assert looks["live"].call_count <= 3
    assert looks["copies"].call_count <= 6
    assert looks["state"].call_count <= 7


@pytest.mark.parametrize("accumulation", [1, 2])
@isolated
def test_steps_that_are_not_logged_look_at_no_live_tensors(accumulation: int) -> None:
    """Replays write the sum of losses and the gradients, and no user code copies these."""
    args = _options(max_steps=20, logging_steps=100, eval_strategy="no", gradient_accumulation_steps=accumulation)
    with counting_looks() as looks:
        run = ours(
            Classifier(),
            vector_samples(160),
            args=arguments(**args),
            xla_args=XLAConfig(replay_verify_every=None),
        )
    assert steps_of(run.trainer).train.replays >= 12 * accumulation
    assert looks["every"].call_count <= 8 * accumulation
