"""`hf_trainer.Trainer` on TorchTPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import hf_trainer
from benchmarks.torch_tpu import stand_in
from tests.isolation import isolated
from tests.torch_tpu.models import arguments, gpt2, losses, texts


def _train(trainer: type, folder: Path, **options: Any) -> Any:
    made = trainer(model=gpt2(), args=arguments(folder, **options), train_dataset=texts(32))
    made.train()
    return made


@isolated
def test_it_trains_as_the_cpu_does(tmp_path: Path) -> None:
    """With tied weights, a falling learning rate and clipping."""
    reference = _train(transformers.Trainer, tmp_path / "cpu", use_cpu=True, optim="adamw_torch")
    transformers.trainer.Accelerator  # noqa: B018
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    trained = _train(hf_trainer.Trainer, tmp_path / "tpu")
    assert trained.accelerator.device == trained.args.device == torch.device("tpu:0")
    torch.testing.assert_close(losses(trained), losses(reference), rtol=0, atol=1e-5)
    for (name, mine), other in zip(trained.model.named_parameters(), reference.model.parameters(), strict=True):
        torch.testing.assert_close(mine.detach().cpu(), other.detach(), rtol=0, atol=1e-4, msg=name)
