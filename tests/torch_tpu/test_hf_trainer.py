"""`hf_trainer.Trainer` on TorchTPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from accelerate.state import AcceleratorState

import hf_trainer
from benchmarks.torch_tpu import stand_in
from tests.isolation import isolated
from tests.torch_tpu.models import arguments, gpt2, losses, texts


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
    of_xla = {name: options.pop(name) for name in ("step_replay", "accumulation", "sharding") if name in options}
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
