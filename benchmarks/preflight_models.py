"""Models of real sizes, on the meta device and without dropout, and batches for them, to be compiled ahead of time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers as hf

Batch = Mapping[str, torch.Tensor]
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model of a real size.

    Attributes:
        make: the model, with so many layers.
        layers: of the real size.
        batch: for so many rows.
        rows: in a batch, of all devices.
    """

    make: Callable[[int], torch.nn.Module]
    layers: int
    batch: Callable[[int], Batch]
    rows: int = 16


def _tokens(length: int) -> Callable[[int], Batch]:
    def batch(rows: int) -> Batch:
        tokens = torch.zeros(rows, length, dtype=torch.long)
        return {"input_ids": tokens, "labels": tokens.clone()}

    return batch


def _images(rows: int) -> Batch:
    return {"pixel_values": torch.zeros(rows, 3, 224, 224), "labels": torch.zeros(rows, dtype=torch.long)}


def _gpt2(layers: int) -> torch.nn.Module:
    config = hf.GPT2Config(n_layer=layers, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0, use_cache=False)
    return hf.GPT2LMHeadModel(config)


def _llama(**sizes: int) -> Callable[[int], torch.nn.Module]:
    def make(layers: int) -> torch.nn.Module:
        config = hf.LlamaConfig(
            num_hidden_layers=layers, vocab_size=128256, num_attention_heads=32, num_key_value_heads=8,
            max_position_embeddings=4096, use_cache=False, **sizes,
        )  # fmt: skip
        return hf.LlamaForCausalLM(config)

    return make


def _gpt_neo(layers: int) -> torch.nn.Module:
    config = hf.GPTNeoConfig(
        hidden_size=2048, num_layers=layers, num_heads=16, attention_types=[[["global", "local"], layers // 2]],
        attention_dropout=0.0, embed_dropout=0.0, resid_dropout=0.0, use_cache=False,
    )  # fmt: skip
    return hf.GPTNeoForCausalLM(config)


def _mixtral(layers: int) -> torch.nn.Module:
    config = hf.MixtralConfig(
        hidden_size=1024, intermediate_size=3584, num_hidden_layers=layers, num_attention_heads=16,
        num_key_value_heads=8, num_local_experts=8, vocab_size=32000, max_position_embeddings=4096, use_cache=False,
    )  # fmt: skip
    return hf.MixtralForCausalLM(config)


def _vit(layers: int) -> torch.nn.Module:
    config = hf.ViTConfig(
        hidden_size=1024, intermediate_size=4096, num_hidden_layers=layers, num_attention_heads=16, num_labels=1000,
        **_NO_DROPOUT,
    )  # fmt: skip
    return hf.ViTForImageClassification(config)


def _t5(layers: int) -> torch.nn.Module:
    config = hf.T5Config(
        d_model=1024, d_ff=4096, d_kv=64, num_heads=16, num_layers=layers, vocab_size=32128, dropout_rate=0.0,
        decoder_start_token_id=0, use_cache=False,
    )  # fmt: skip
    return hf.T5ForConditionalGeneration(config)


# GPT-2 of 124 million parameters, Llama 3.2 of 1 billion and Llama 3 of 8 (without tied weights), GPT-Neo of 1.3, a
# Mixtral-like of 1.2 with 8 experts, ViT-L/16, T5 large.
MODELS: dict[str, Model] = {
    "gpt2": Model(make=_gpt2, layers=12, batch=_tokens(1024)),
    "llama-1b": Model(make=_llama(hidden_size=2048, intermediate_size=8192), layers=16, batch=_tokens(1024)),
    "llama-8b": Model(make=_llama(hidden_size=4096, intermediate_size=14336), layers=32, batch=_tokens(1024)),
    "gpt-neo": Model(make=_gpt_neo, layers=24, batch=_tokens(1024)),
    "mixtral": Model(make=_mixtral, layers=12, batch=_tokens(1024)),
    "vit": Model(make=_vit, layers=24, batch=_images, rows=128),
    "t5": Model(make=_t5, layers=24, batch=_tokens(512)),
}


def build(name: str, layers: int = 0) -> tuple[Any, Batch]:
    """A model without weights, and a batch.

    Args:
        name: one of `MODELS`.
        layers: how many; 0 for those of the real size.
    """
    model = MODELS[name]
    with torch.device("meta"):
        made = model.make(layers or model.layers)
        return made, model.batch(model.rows)
