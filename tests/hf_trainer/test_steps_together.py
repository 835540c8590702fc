"""`steps_per_execution` in the Trainer: fewer executions, and the same run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

import hf_trainer
import xla_adapters
from tests.hf_trainer.scenarios import Run, arguments, gpt2, ours, steps_of, token_samples
from xla_adapters import UnsupportedOptionError

pytestmark = pytest.mark.isolated

# The first two of the twelve steps are traced.
_STEPS = 12


def _run(several: int, **options: Any) -> Run:
    own = {name: options.pop(name) for name in ("callbacks", "eval_dataset") if name in options}
    args = arguments(options.pop("folder", None), **{"max_steps": _STEPS, "logging_steps": 6, **options})
    return ours(gpt2(dropout=0.2), token_samples(64), args=args, steps_per_execution=several, **own)


def _same(one: Run, other: Run) -> None:
    for name in ("loss", "grad_norm", "learning_rate", "eval_loss"):
        assert one.logged(name) == other.logged(name), name
    before, after = one.parameters(), other.parameters()
    assert all(torch.equal(value, after[name]) for name, value in before.items())


def test_the_same_run_in_fewer_executions() -> None:
    one, together = _run(1, warmup_steps=3), _run(5, warmup_steps=3)
    _same(one, together)
    # The first log verifies the recorded call. At the second one the last step is executed alone.
    assert steps_of(together.trainer).train.replays == 6
    assert [step.executions for step in together.steps] == [1] * 6 + [0, 0, 0, 0, 1, 0]
    # The executable of one step exists already.
    assert sum(step.compiles for step in together.steps) == 1


def test_accumulation_evaluation_and_checkpoints(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "gradient_accumulation_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 6,
        "save_strategy": "steps",
        "save_steps": 6,
    }
    one, together = (
        _run(several, folder=str(tmp_path / str(several)), eval_dataset=token_samples(8, seed=1), **options)
        for several in (1, 3)
    )
    _same(one, together)
    for step in (6, 12):
        files = [tmp_path / str(several) / f"checkpoint-{step}" / "optimizer.pt" for several in (1, 3)]
        states = [torch.load(file)["state"] for file in files]
        assert all(
            torch.equal(value, states[1][index][name])
            for index, state in states[0].items()
            for name, value in state.items()
        )


class _Norms(TrainerCallback):
    """Reads the weights after each step."""

    def __init__(self) -> None:
        self.norms: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, *, model: Any, **kwargs: Any) -> None:
        self.norms.append(float(model.lm_head.weight.norm()))


def test_a_callback_that_looks_sees_each_step() -> None:
    callbacks = _Norms(), _Norms()
    one, together = (_run(several, callbacks=[callback]) for several, callback in zip((1, 4), callbacks, strict=True))
    _same(one, together)
    assert callbacks[0].norms == callbacks[1].norms
    assert len(set(callbacks[1].norms)) == _STEPS
    reasons = steps_of(together.trainer).train.replay_reasons
    assert any("before their time" in reason and f"{__file__}:" in reason for reason in reasons), reasons


def test_with_sharding_it_is_refused() -> None:
    xla_adapters.initialize(spmd=True)
    with pytest.raises(UnsupportedOptionError, match="steps_per_execution=2 with sharding"):
        hf_trainer.Trainer(gpt2(), arguments(), steps_per_execution=2, sharding="dp")
