"""Loads a checkpoint whose weights are named as on disk and not as in the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import PreTrainedModel


def load_renamed_weights(model: PreTrainedModel, folder: str | Path) -> None:
    """Loads the weights of a checkpoint that `save_pretrained` wrote.

    Some models are saved under the names their published checkpoints have (ViT: `attention.attention.key`
    for `attention.k_proj`). transformers' Trainer (5.23) loads the file as it is, matches none of these
    names and goes on with a warning: resume and best model are silently not loaded, on any device.
    `from_pretrained` knows the renaming.

    Args:
        model: takes over the weights, in place.
        folder: the checkpoint.

    Raises:
        RuntimeError: the checkpoint is another model's.
    """
    loaded: Any = type(model).from_pretrained(folder, dtype=model.dtype)
    model.load_state_dict(loaded.state_dict())
