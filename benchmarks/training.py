"""Data and training arguments that all compared trainers share."""

from __future__ import annotations

from typing import Any, TypeVar

from torch.utils.data import Dataset
from transformers import TrainingArguments

from benchmarks.zoo import Batch

LEARNING_RATE = 1e-3
# transformers' default.
MAX_NORM = 1.0
_Arguments = TypeVar("_Arguments", bound=TrainingArguments)


class Batches(Dataset[Any]):
    """A dataset of ready batches: each sample is a batch."""

    def __init__(self, batches: list[Batch]) -> None:
        self._batches = batches

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, index: int) -> Batch:
        return self._batches[index]


def only_item(samples: list[Batch]) -> Batch:
    """The collator for `Batches`."""
    (batch,) = samples
    return batch


def arguments(folder: str, kind: type[_Arguments] = TrainingArguments, **options: Any) -> _Arguments:
    """Arguments for one epoch over `Batches` in order; otherwise transformers' defaults, and `options`."""
    values: dict[str, Any] = {
        "output_dir": folder,
        "per_device_train_batch_size": 1,
        "num_train_epochs": 1,
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "train_sampling_strategy": "sequential",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "remove_unused_columns": False,
    }
    return kind(**{**values, **options})
