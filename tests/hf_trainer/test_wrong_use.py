"""Mistakes of users: the error says what is wrong, where, and what to do."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch

import hf_trainer
from tests.hf_trainer.scenarios import Classifier, arguments, vector_samples
from tests.isolation import isolated
from xla_adapters.errors import CheckpointNotFoundError, LossError


class _Returns(hf_trainer.Trainer):
    """Its loss is what the test wants."""

    result: Any = None

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        logits = model(inputs["x"])["logits"]
        return self.result(logits) if callable(self.result) else self.result


def _train(kind: Any = hf_trainer.Trainer, model: Any = None, **options: Any) -> Any:
    samples = vector_samples(16)
    trainer = kind(model or Classifier(), arguments(max_steps=2), train_dataset=samples, **options)
    trainer.train()
    return trainer


@pytest.mark.parametrize(
    ("result", "found"),
    [
        (None, "None. Return the loss as a tensor"),
        (1.5, "a float. Return"),
        (lambda logits: logits.mean(1), r"a tensor of the shape \[4\]. Reduce it to one number: loss.mean\(\)"),
        (lambda logits: (logits.mean(), logits), "a tuple. Return"),
    ],
    ids=["None", "float", "one for each sample", "with outputs"],
)
@isolated
def test_a_loss_that_is_none(result: Any, found: str) -> None:
    kind = type("Mine", (_Returns,), {"result": result if not callable(result) else staticmethod(result)})
    line = inspect.getsourcelines(_Returns.compute_loss)[1]
    with pytest.raises(LossError, match=rf"_Returns.compute_loss \(.*test_wrong_use.py:{line}\) returns is {found}"):
        _train(kind)


class _Tuple(Classifier):
    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        return (self.layers(x),)


@isolated
def test_a_loss_of_the_model_and_of_a_function() -> None:
    with pytest.raises(LossError, match=r"_Tuple.forward \(.*\) returns is a tensor of the shape"):
        _train(model=_Tuple())

    def each(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(outputs["logits"], labels, reduction="none")

    with pytest.raises(LossError, match=r"each \(.*test_wrong_use.py:\d+\) returns"):
        _train(compute_loss_func=each)
    # The process and the classes are as before.
    assert len(_train().state.log_history) > 0


@pytest.mark.parametrize("safe", [True, False])
@isolated
def test_a_checkpoint_that_is_not_there(safe: bool, tmp_path: Path) -> None:
    options = arguments(str(tmp_path), max_steps=2, save_strategy="steps", save_steps=2)
    trainer = hf_trainer.Trainer(Classifier(), options, train_dataset=vector_samples(16), safe_checkpoints=safe)
    with pytest.raises((CheckpointNotFoundError, ValueError), match="No valid checkpoint found in output directory"):
        trainer.train(resume_from_checkpoint=True)
    trainer.train()
    with pytest.raises(CheckpointNotFoundError, match=r"at .*checkpoint-3: nothing is there \(in "):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    file = tmp_path / "checkpoint-2" / "model.safetensors"
    with pytest.raises(CheckpointNotFoundError, match=r"it is a file, .*did you mean .*checkpoint-2\?"):
        trainer.train(resume_from_checkpoint=str(file))
