"""`hf_trainer.Trainer` on TorchTPU."""

from __future__ import annotations

import functools
import logging
import os
import signal
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
import transformers
from accelerate.state import AcceleratorState

import hf_trainer
from tests.isolation import isolated, outcome_of
from tests.torch_tpu import stand_in
from tests.torch_tpu.models import arguments, gpt2, losses, texts
from xla_adapters import TensorReadError, get_runtime
from xla_adapters.errors import UnsupportedOptionError, XLAAdapterError
from xla_adapters.utils.patching import replaced


class StepCounts(transformers.TrainerCallback):
    """Calls of the plugin in each step: of the step, and of the log after it."""

    def __init__(self) -> None:
        self.counts: list[stand_in.Counts] = []
        self._before: stand_in.Counts | None = None

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        torch.accelerator.synchronize()
        if self._before is not None:
            self.counts.append(stand_in.counts().since(self._before))
        self._before = stand_in.counts()


def _trainer(folder: Path, *, dropout: float = 0.0, callbacks: list[Any] | None = None, **options: Any) -> Any:
    names = {"step_replay", "accumulation", "sharding", "xla_mode", "rng_algorithm"}
    of_xla = {name: options.pop(name) for name in names & set(options)}
    return hf_trainer.Trainer(
        model=gpt2(dropout),
        args=arguments(folder, **options),
        train_dataset=texts(32),
        eval_dataset=texts(8),
        callbacks=callbacks,
        **of_xla,
    )


def _on_cpu(folder: Path, **options: Any) -> transformers.Trainer:
    args = arguments(folder, use_cpu=True, optim="adamw_torch", **options)
    trainer = transformers.Trainer(model=gpt2(), args=args, train_dataset=texts(32), eval_dataset=texts(8))
    trainer.train()
    # So that the next trainer has another device.
    AcceleratorState._reset_state(reset_partial_state=True)
    return trainer


@isolated
@pytest.mark.parametrize("step_replay", ["auto", False])
def test_it_trains_as_the_cpu_does_in_one_launch_per_step(step_replay: str | bool, tmp_path: Path) -> None:
    """With tied weights, a falling learning rate and clipping, and nothing set by hand."""
    reference = _on_cpu(tmp_path / "cpu")
    counted = StepCounts()
    trained = _trainer(tmp_path / "tpu", step_replay=step_replay, callbacks=[counted])
    trained.train()
    assert trained.accelerator.device == trained.args.device == torch.device("tpu:0")
    assert trained.model.lm_head.weight is trained.model.transformer.wte.weight
    torch.testing.assert_close(losses(trained), losses(reference), rtol=0, atol=1e-5)
    for (name, mine), other in zip(trained.model.named_parameters(), reference.model.parameters(), strict=True):
        torch.testing.assert_close(mine.detach().cpu(), other.detach(), rtol=0, atol=1e-4, msg=name)
    settled = counted.counts[3:]
    assert {counts.executions for counts in settled} == {1}
    assert {counts.compiles for counts in settled} == {0}
    assert trained.run_stats.steps == 8


@isolated
def test_the_device_of_accelerate_is_set_and_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="hf_trainer"):
        for _ in range(2):
            _trainer(tmp_path)
    (said,) = [record.getMessage() for record in caplog.records if record.name.startswith("hf_trainer")]
    assert said == "accelerate took the device cpu; a trainer of TorchTPU gives it tpu:0"


@isolated
def test_an_accelerator_of_the_program_is_no_obstacle(tmp_path: Path) -> None:
    args = arguments(tmp_path)
    accelerate.Accelerator()
    trainer = hf_trainer.Trainer(model=gpt2(), args=args, train_dataset=texts(4))
    assert trainer.accelerator.device == torch.device("tpu:0")


@isolated
def test_evaluation_is_that_of_the_cpu(tmp_path: Path) -> None:
    reference = _on_cpu(tmp_path / "cpu", max_steps=2, eval_strategy="steps", eval_steps=2).state.log_history[-2]
    trainer = _trainer(tmp_path / "tpu", max_steps=2)
    trainer.train()
    assert trainer.evaluate()["eval_loss"] == pytest.approx(reference["eval_loss"], abs=1e-5)
    assert trainer.predict(texts(4)).predictions.shape == (4, 12, 32)


@isolated
@pytest.mark.parametrize("accumulation", ["per_micro_batch", "unrolled"])
def test_accumulation_is_that_of_the_cpu(accumulation: str, tmp_path: Path) -> None:
    options = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}
    reference = _on_cpu(tmp_path / "cpu", **options)
    trainer = _trainer(tmp_path / "tpu", accumulation=accumulation, **options)
    trainer.train()
    torch.testing.assert_close(losses(trainer), losses(reference), rtol=0, atol=1e-5)


@isolated
@pytest.mark.parametrize(
    ("option", "value", "named"),
    [
        ("sharding", "fsdp", "torch_tpu"),
        ("xla_mode", "lazy", "xla_mode='lazy'"),
        ("xla_mode", "eager+dynamo", "xla_mode='eager\\+dynamo'"),
        ("rng_algorithm", "philox", "rng_algorithm='philox'"),
    ],
)
def test_what_is_not_there_says_so(option: str, value: Any, named: str, tmp_path: Path) -> None:
    with pytest.raises(XLAAdapterError, match=named):
        _trainer(tmp_path, **{option: value}).train()


@isolated
def test_a_read_in_the_step_is_an_error_and_the_step_is_undone(tmp_path: Path) -> None:
    class Reading(hf_trainer.Trainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(*args, **kwargs)
            if self.state.global_step == 2:
                loss.item()
            return loss

    trainer = Reading(model=gpt2(), args=arguments(tmp_path), train_dataset=texts(32))
    before: list[torch.Tensor] = []

    class Noting(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            before[:] = [parameter.detach().cpu() for parameter in model.parameters()]

    trainer.add_callback(Noting())
    with pytest.raises(TensorReadError, match=r"test_hf_trainer\.py"):
        trainer.train()
    assert trainer.state.global_step == 2
    for parameter, value in zip(trainer.model.parameters(), before, strict=True):
        assert torch.equal(parameter.detach().cpu(), value)


# ---- resuming ------------------------------------------------------------------------------------


class _Killed(transformers.TrainerCallback):
    """Kills the process at the begin of a step."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self._step:
            os.kill(os.getpid(), signal.SIGKILL)


def _run(folder: Path, *, killed_at: int | None = None, resume: bool = False) -> tuple[list[float], Any, int]:
    callbacks = [] if killed_at is None else [_Killed(killed_at)]
    trainer = _trainer(
        folder, dropout=0.3, callbacks=callbacks, max_steps=12, save_strategy="steps", save_steps=4, logging_steps=1
    )
    trainer.train(resume_from_checkpoint=resume or None)
    weights = {name: value.cpu().numpy() for name, value in trainer.model.state_dict().items()}
    return losses(trainer), weights, get_runtime().random.seed()


def test_a_run_that_was_killed_resumes_exactly_under_dropout(tmp_path: Path) -> None:
    whole = outcome_of(functools.partial(_run, tmp_path / "whole"))
    assert whole.ok, whole.error
    killed = outcome_of(functools.partial(_run, tmp_path / "cut", killed_at=6))
    assert killed.error == f"the process died with signal {signal.SIGKILL.value}"
    assert sorted(path.name for path in (tmp_path / "cut").glob("checkpoint-*")) == ["checkpoint-4"]
    resumed = outcome_of(functools.partial(_run, tmp_path / "cut", resume=True))
    assert resumed.ok, resumed.error
    (losses_whole, weights_whole, seed_whole), (losses_resumed, weights, seed) = whole.value, resumed.value
    assert losses_resumed == losses_whole
    assert {name for name, value in weights.items() if not (value == weights_whole[name]).all()} == set()
    assert seed == seed_whole


@isolated
def test_several_processes_are_refused(tmp_path: Path) -> None:
    with replaced(transformers.TrainingArguments, "world_size", property(lambda _: 2)):
        with pytest.raises(UnsupportedOptionError, match="2 processes were launched"):
            hf_trainer.Trainer(gpt2(), arguments(tmp_path), train_dataset=texts(4))
