"""Small models of the families that sharding is tested with. Every width is divisible by 8."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.tiny_models import tiny

VOCABULARY, ROWS, LENGTH = 128, 16, 12
_SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
}
_TEXT: dict[str, Any] = {**_SIZES, "vocab_size": VOCABULARY}


def _language(generator: torch.Generator) -> dict[str, torch.Tensor]:
    tokens = torch.randint(1, VOCABULARY, (LENGTH,), generator=generator)
    return {"input_ids": tokens, "labels": tokens.clone()}


def _sentence(generator: torch.Generator) -> dict[str, torch.Tensor]:
    tokens = torch.randint(1, VOCABULARY, (LENGTH,), generator=generator)
    return {"input_ids": tokens, "labels": tokens[0] % 8}


def _image(generator: torch.Generator) -> dict[str, torch.Tensor]:
    pixels = torch.randn(3, 16, 16, generator=generator)
    return {"pixel_values": pixels, "labels": (pixels.sum() > 0).long()}


_Samples = Callable[[torch.Generator], dict[str, torch.Tensor]]
_GPT2 = {"n_embd": 64, "n_layer": 2, "n_head": 8, "vocab_size": VOCABULARY, "n_positions": 32}
_T5 = {"d_model": 64, "d_ff": 128, "d_kv": 8, "num_layers": 2, "num_heads": 8, "vocab_size": VOCABULARY}
_NEO = {"hidden_size": 64, "num_heads": 8, "intermediate_size": 128, "vocab_size": VOCABULARY}
# The sizes of a model, and what makes a sample for it.
MODELS: dict[str, tuple[dict[str, Any], _Samples]] = {
    "gpt2": (_GPT2, _language),
    "llama": ({**_TEXT, "num_key_value_heads": 4}, _language),
    "gpt-neo": (_NEO, _language),
    "mixtral": ({**_TEXT, "num_key_value_heads": 4, "num_local_experts": 8}, _language),
    "bert": ({**_TEXT, "num_labels": 8}, _sentence),
    "t5": (_T5, _language),
    "vit": ({**_SIZES, "image_size": 16, "num_labels": 8}, _image),
    "resnet": ({"num_labels": 8}, _image),
}


def model(name: str) -> Any:
    """A model of a family, the same at each call."""
    return tiny(name, **MODELS[name][0])


def data(name: str, rows: int = 4 * ROWS) -> list[dict[str, torch.Tensor]]:
    """Samples for a model, the same at each call."""
    generator = torch.Generator().manual_seed(1)
    return [MODELS[name][1](generator) for _ in range(rows)]
