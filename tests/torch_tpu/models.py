"""Models, data and arguments of the tests with trainers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

SIZE, LENGTH = 32, 12


def gpt2(dropout: float = 0.0) -> GPT2LMHeadModel:
    """The same weights at each call."""
    torch.manual_seed(0)
    # TorchTPU's attention is a kernel for TPUs, which the stand-in for one cannot run.
    return GPT2LMHeadModel(
        GPT2Config(
            n_layer=2,
            n_embd=16,
            n_head=2,
            vocab_size=SIZE,
            n_positions=LENGTH,
            bos_token_id=0,
            eos_token_id=0,
            resid_pdrop=dropout,
            embd_pdrop=dropout,
            attn_pdrop=dropout,
            attn_implementation="eager",
            use_cache=False,
        )
    )


def texts(number: int) -> list[dict[str, torch.Tensor]]:
    """Samples. With a mask, without which transformers computes a sum that the stand-in cannot compile."""
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(0, SIZE, (number, LENGTH), generator=generator)
    mask = torch.ones(LENGTH, dtype=torch.long)
    return [{"input_ids": row, "labels": row.clone(), "attention_mask": mask} for row in rows]


def arguments(folder: Path, **options: Any) -> TrainingArguments:
    """transformers' defaults, but for what the tests change."""
    values: dict[str, Any] = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "max_steps": 8,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    return TrainingArguments(**values | options)


def losses(trainer: Any) -> list[float]:
    """The logged ones."""
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
