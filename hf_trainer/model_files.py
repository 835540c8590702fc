"""Models from the configuration files of transformers, on the meta device: shapes without weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import transformers

from hf_trainer.framework_patches import as_if_compiling
from xla_adapters.errors import ConfigError

_Loaded = tuple[torch.nn.Module, dict[str, torch.Tensor], Callable[[], AbstractContextManager[Any]]]
# Heads whose labels are one number per sample.
_PER_SAMPLE = ("ForSequenceClassification", "ForImageClassification", "ForAudioClassification", "ForMultipleChoice")


def load(path: Path, rows: int, length: int | None) -> _Loaded:
    """Makes a model from its configuration file, and a batch for it.

    Args:
        path: of a `config.json`.
        rows: samples in the batch.
        length: tokens in a sample; None for images, whose size is in the configuration.

    Returns:
        The model, a batch with labels, and a function that returns the context for forward passes.

    Raises:
        ConfigError: the file does not describe a model of transformers, or the length is missing.
    """
    values = json.loads(path.read_text(encoding="utf-8"))
    kind = values.get("model_type")
    if kind not in transformers.CONFIG_MAPPING:
        raise ConfigError(f"{path}: model_type={kind!r} is none that transformers {transformers.__version__} knows")
    config = transformers.CONFIG_MAPPING[kind].from_dict(values)
    cls = _class_of(config, path)
    with torch.device("meta"):
        model: Any = cls(config)
        return model, _batch(model, config, rows, length, path), as_if_compiling


def _class_of(config: Any, path: Path) -> Any:
    for name in config.architectures or ():
        if hasattr(transformers, name):
            return getattr(transformers, name)
    for auto in (transformers.AutoModelForCausalLM, transformers.AutoModelForSeq2SeqLM):
        if type(config) in auto._model_mapping:
            return auto._model_mapping[type(config)]
    raise ConfigError(f"{path}: name the class of the model under 'architectures'; {config.model_type!r} has several")


def _batch(model: Any, config: Any, rows: int, length: int | None, path: Path) -> dict[str, torch.Tensor]:
    whole = {"labels": torch.zeros(rows, dtype=torch.long)}
    if model.main_input_name == "pixel_values":
        size = config.image_size if hasattr(config, "image_size") else 224
        sizes = tuple(size) if isinstance(size, (list, tuple)) else (size, size)
        return {"pixel_values": torch.zeros(rows, config.num_channels, *sizes), **whole}
    if model.main_input_name != "input_ids":
        raise ConfigError(
            f"{path}: what a batch of {model.main_input_name!r} looks like is not known; use module:factory"
        )
    if length is None:
        raise ConfigError(f"{path}: a batch of text needs a length: --batch {rows}x2048")
    tokens = {"input_ids": torch.zeros(rows, length, dtype=torch.long)}
    if type(model).__name__.endswith(_PER_SAMPLE):
        return {**tokens, **whole}
    return {**tokens, "labels": torch.zeros(rows, length, dtype=torch.long)}
