"""Checkpoints of models whose weights have other names on disk than in the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from datasets import Dataset
from safetensors import safe_open

import hf_trainer
from tests.isolation import isolated


def build() -> transformers.ViTForImageClassification:
    transformers.set_seed(0)
    return transformers.ViTForImageClassification(
        transformers.ViTConfig(
            image_size=8,
            patch_size=4,
            num_channels=1,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            hidden_dropout_prob=0.1,
            num_labels=3,
        )
    )


def images(count: int) -> Dataset:
    pixels = torch.randn(count, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    columns = {"pixel_values": pixels.tolist(), "labels": [index % 3 for index in range(count)]}
    return Dataset.from_dict(columns).with_format("torch")


def trainer(folder: Path, **options: Any) -> hf_trainer.Trainer:
    args = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=4,
        per_device_train_batch_size=4,
        per_device_eval_batch_size=4,
        logging_steps=1,
        save_steps=2,
        report_to=[],
        disable_tqdm=True,
        **options,
    )
    return hf_trainer.Trainer(build(), args, train_dataset=images(16), eval_dataset=images(4))


@isolated
def test_resume_is_exact(tmp_path: Path) -> None:
    whole = trainer(tmp_path)
    whole.train()
    with safe_open(tmp_path / "checkpoint-2" / "model.safetensors", "pt") as weights:
        assert set(weights.keys()) != set(whole.model.state_dict())
    resumed = trainer(tmp_path)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value.cpu(), resumed.model.state_dict()[name].cpu()), name


@isolated
def test_best_model_is_loaded(tmp_path: Path) -> None:
    # A learning rate this high makes each step worse, so the first checkpoint is the best.
    best = trainer(
        tmp_path,
        load_best_model_at_end=True,
        metric_for_best_model="loss",
        eval_strategy="steps",
        eval_steps=2,
        learning_rate=1.0,
        lr_scheduler_type="constant",
    )
    best.train()
    assert best.state.best_model_checkpoint is not None
    reloaded = type(best.model).from_pretrained(best.state.best_model_checkpoint)
    for name, value in reloaded.state_dict().items():
        assert torch.equal(value, best.model.state_dict()[name].cpu()), name
