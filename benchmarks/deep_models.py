"""The transformers that runs are compared on, by family, depth and width."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers

from benchmarks.training import token_batches
from benchmarks.zoo_batches import Batch

DROPOUT = 0.1
GPT2, VIT = "gpt2", "vit"
# Of a ViT's images and their patches.
PIXELS, PATCH = 32, 8


@dataclass(frozen=True)
class Size:
    """A model, and its batches."""

    layers: int
    width: int
    length: int = 64
    batch: int = 8
    vocabulary: int = 256
    heads: int = 2
    dropout: float = DROPOUT
    family: str = GPT2

    def __str__(self) -> str:
        return f"{self.layers}x{self.width}" if self.family == GPT2 else f"{self.family} {self.layers}x{self.width}"

    def model(self) -> transformers.PreTrainedModel:
        """The model with random weights, the same at each call."""
        torch.manual_seed(0)
        return FAMILIES[self.family](self)

    def batches(self, number: int) -> list[Batch]:
        """Random tokens that predict themselves; for a ViT, images with their classes."""
        if self.family == VIT:
            draw = torch.Generator().manual_seed(0)
            shape = (self.batch, 3, PIXELS, PIXELS)
            return [
                {
                    "pixel_values": torch.randn(shape, generator=draw),
                    "labels": torch.randint(0, self.vocabulary, (self.batch,), generator=draw),
                }
                for _ in range(number)
            ]
        return token_batches(number, (self.batch, self.length), self.vocabulary)


def _gpt2(size: Size) -> transformers.PreTrainedModel:
    config = transformers.GPT2Config(
        vocab_size=size.vocabulary,
        n_positions=size.length,
        n_embd=size.width,
        n_layer=size.layers,
        n_head=size.heads,
        resid_pdrop=size.dropout,
        embd_pdrop=size.dropout,
        attn_pdrop=size.dropout,
        bos_token_id=0,
        eos_token_id=0,
    )
    return transformers.GPT2LMHeadModel(config)


def _common(size: Size, grows: int) -> dict[str, Any]:
    """Configuration options that most families share."""
    return {
        "vocab_size": size.vocabulary,
        "hidden_size": size.width,
        "intermediate_size": grows * size.width,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "max_position_embeddings": size.length,
        "pad_token_id": 0,
    }


def _llama(size: Size) -> transformers.PreTrainedModel:
    config = transformers.LlamaConfig(
        **_common(size, 3), attention_dropout=size.dropout, bos_token_id=0, eos_token_id=0
    )
    return transformers.LlamaForCausalLM(config)


def _qwen3(size: Size) -> transformers.PreTrainedModel:
    config = transformers.Qwen3Config(
        **_common(size, 3),
        num_key_value_heads=1,
        head_dim=size.width // size.heads,
        attention_dropout=size.dropout,
        bos_token_id=0,
        eos_token_id=0,
    )
    return transformers.Qwen3ForCausalLM(config)


def _bert(size: Size) -> transformers.PreTrainedModel:
    config = transformers.BertConfig(
        **_common(size, 4), hidden_dropout_prob=size.dropout, attention_probs_dropout_prob=size.dropout
    )
    return transformers.BertForMaskedLM(config)


def _vit(size: Size) -> transformers.PreTrainedModel:
    config = transformers.ViTConfig(
        image_size=PIXELS,
        patch_size=PATCH,
        hidden_size=size.width,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        intermediate_size=4 * size.width,
        num_labels=size.vocabulary,
        hidden_dropout_prob=size.dropout,
    )
    return transformers.ViTForImageClassification(config)


FAMILIES: dict[str, Callable[[Size], transformers.PreTrainedModel]] = {
    GPT2: _gpt2,
    "llama": _llama,
    "qwen3": _qwen3,
    "bert": _bert,
    VIT: _vit,
}


def sizes(text: str, **options: Any) -> list[Size]:
    """`"2x128,12x32"`: layers and width of each; `"vit 2x128"`: of another family than GPT-2.

    Raises:
        ValueError: it is written otherwise.
    """
    made = []
    for item in text.split(","):
        family, _, size = item.strip().rpartition(" ")
        layers, times, width = size.partition("x")
        if not (times and layers.isdigit() and width.isdigit()):
            raise ValueError(f"{item!r} is not LAYERSxWIDTH, as in 12x32")
        if family and family not in FAMILIES:
            raise ValueError(f"no family is called {family!r}; there are {', '.join(FAMILIES)}")
        made.append(Size(int(layers), int(width), **options, **({"family": family} if family else {})))
    return made
