"""`WeightLoading`: loads the weights of a checkpoint, also if they have other names on disk than in the model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import transformers
from transformers import PreTrainedModel

from xla_adapters import get_runtime
from xla_adapters.runtime.transfers import uploading


class WeightLoading:
    """Loads weights in one execution, and repairs what transformers' Trainer does not load.

    Args:
        trainer: the trainer.
        base: the methods that the mixin overrides.
    """

    def __init__(self, trainer: transformers.Trainer, base: Any) -> None:
        self._trainer = trainer
        self._base = base
        self._checkpoint: str | None = None

    @contextmanager
    def loading(self, checkpoint: str | None) -> Iterator[None]:
        """Around the loading of a checkpoint's weights.

        Args:
            checkpoint: its folder.
        """
        self._checkpoint = checkpoint
        try:
            # One execution instead of one per weight. A weight that is overwritten eagerly would lose its sharding.
            with uploading():
                yield
            get_runtime().tracing.flush()
        finally:
            self._checkpoint = None

    def after_load(self, load_result: Any) -> None:
        """As `Trainer._issue_warnings_after_load`. If names did not match, it loads by `load_renamed_weights`."""
        model = self._trainer.model
        if load_result.unexpected_keys and self._checkpoint and isinstance(model, PreTrainedModel):
            load_renamed_weights(model, self._checkpoint)
        else:
            self._base._issue_warnings_after_load(load_result)


def load_renamed_weights(model: PreTrainedModel, folder: str | Path) -> None:
    """Loads the weights of a checkpoint that `save_pretrained` wrote.

    Some models are saved under the names of their published checkpoints (ViT: `attention.attention.key` for
    `attention.k_proj`). transformers' Trainer (5.23) loads the file as it is, matches none of these names and
    continues with a warning: resume and best model are silently not loaded, on any device. `from_pretrained` knows
    the renaming.

    Args:
        model: gets the weights, in place.
        folder: the checkpoint.

    Raises:
        RuntimeError: the checkpoint belongs to another model.
    """
    loaded: Any = type(model).from_pretrained(folder, dtype=model.dtype)
    model.load_state_dict(loaded.state_dict())
