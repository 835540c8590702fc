"""Models from the configuration files of transformers, on the meta device: shapes without weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError

from hf_trainer.patches import as_if_compiling
from xla_adapters.errors import MODEL_FAILURES, ConfigError
from xla_adapters.utils.location import described

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
    values = _values_of(path)
    kind: Any = values.get("model_type")
    if kind not in transformers.CONFIG_MAPPING:
        raise ConfigError(f"{path}: model_type={kind!r} is none that transformers {transformers.__version__} knows")
    try:
        config = transformers.CONFIG_MAPPING[kind].from_dict(values)
        cls = _class_of(config, path)
        with torch.device("meta"):
            model: Any = cls(config)
            batch = _batch(model, config, rows, length, path)
    except ConfigError:
        raise
    except (*MODEL_FAILURES, StrictDataclassError) as error:
        raise ConfigError(f"{path}: transformers makes no model of it: {described(error)}") from error
    return model, batch, as_if_compiling


def _values_of(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is no JSON: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path} is no configuration of transformers: it is a {type(values).__name__}, not an object")
    return values


def _class_of(config: Any, path: Path) -> Any:
    names = config.architectures or ()
    for name in names:
        if hasattr(transformers, name):
            return getattr(transformers, name)
    if names:
        raise ConfigError(f"{path}: transformers has no {', '.join(names)}; use module:factory for a class of your own")
    # That for CausalLM of an encoder and decoder is its decoder alone.
    auto = transformers.AutoModelForSeq2SeqLM if config.is_encoder_decoder else transformers.AutoModelForCausalLM
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
    positions = getattr(config, "max_position_embeddings", None)
    # Rotary positions go on. Those of a table end, and on the meta device nobody would notice.
    if positions is not None and length > positions and not hasattr(config, "rope_parameters"):
        raise ConfigError(f"{path}: samples of {length} tokens are longer than its {positions} positions")
    tokens = {"input_ids": torch.zeros(rows, length, dtype=torch.long)}
    if type(model).__name__.endswith(_PER_SAMPLE):
        return {**tokens, **whole}
    return {**tokens, "labels": torch.zeros(rows, length, dtype=torch.long)}
