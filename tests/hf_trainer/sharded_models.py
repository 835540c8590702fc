"""Small models of the families that sharding is tested with. Every width is divisible by 8."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf

VOCABULARY, ROWS, LENGTH = 128, 16, 12
_SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "vocab_size": VOCABULARY,
}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def _gpt2() -> Any:
    return hf.GPT2LMHeadModel(
        hf.GPT2Config(
            n_embd=64, n_layer=2, n_head=8, vocab_size=VOCABULARY, n_positions=32, attn_pdrop=0.0, resid_pdrop=0.0,
            embd_pdrop=0.0, bos_token_id=0, eos_token_id=0,
        )
    )  # fmt: skip


def _llama() -> Any:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**_SIZES, num_key_value_heads=4, max_position_embeddings=64))


def _gpt_neo() -> Any:
    return hf.GPTNeoForCausalLM(
        hf.GPTNeoConfig(
            hidden_size=64, num_layers=2, attention_types=[[["global", "local"], 1]], num_heads=8, window_size=8,
            vocab_size=VOCABULARY, max_position_embeddings=64, intermediate_size=128, attention_dropout=0.0,
            resid_dropout=0.0, embed_dropout=0.0, bos_token_id=0, eos_token_id=0,
        )
    )  # fmt: skip


def _mixtral() -> Any:
    return hf.MixtralForCausalLM(
        hf.MixtralConfig(**_SIZES, num_key_value_heads=4, num_local_experts=8, max_position_embeddings=64)
    )


def _bert() -> Any:
    return hf.BertForSequenceClassification(hf.BertConfig(**_SIZES, **_NO_DROPOUT, num_labels=8))


def _t5() -> Any:
    return hf.T5ForConditionalGeneration(
        hf.T5Config(
            d_model=64, d_ff=128, d_kv=8, num_layers=2, num_heads=8, vocab_size=VOCABULARY, dropout_rate=0.0,
            decoder_start_token_id=0,
        )
    )  # fmt: skip


def _vit() -> Any:
    sizes = {name: value for name, value in _SIZES.items() if name != "vocab_size"}
    return hf.ViTForImageClassification(hf.ViTConfig(**sizes, **_NO_DROPOUT, image_size=16, patch_size=4, num_labels=8))


def _resnet() -> Any:
    return hf.ResNetForImageClassification(
        hf.ResNetConfig(embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], layer_type="basic", num_labels=8)
    )


def _language(generator: torch.Generator) -> dict[str, torch.Tensor]:
    tokens = torch.randint(1, VOCABULARY, (LENGTH,), generator=generator)
    return {"input_ids": tokens, "labels": tokens.clone()}


def _sentence(generator: torch.Generator) -> dict[str, torch.Tensor]:
    tokens = torch.randint(1, VOCABULARY, (LENGTH,), generator=generator)
    return {"input_ids": tokens, "labels": tokens[0] % 8}


def _image(generator: torch.Generator) -> dict[str, torch.Tensor]:
    pixels = torch.randn(3, 16, 16, generator=generator)
    return {"pixel_values": pixels, "labels": (pixels.sum() > 0).long()}


MODELS: dict[str, tuple[Callable[[], Any], Callable[[torch.Generator], dict[str, torch.Tensor]]]] = {
    "gpt2": (_gpt2, _language),
    "llama": (_llama, _language),
    "gpt-neo": (_gpt_neo, _language),
    "mixtral": (_mixtral, _language),
    "bert": (_bert, _sentence),
    "t5": (_t5, _language),
    "vit": (_vit, _image),
    "resnet": (_resnet, _image),
}


def model(name: str) -> Any:
    """A model of a family, the same at each call."""
    torch.manual_seed(0)
    return MODELS[name][0]()


def data(name: str, rows: int = 4 * ROWS) -> list[dict[str, torch.Tensor]]:
    """Samples for a model, the same at each call."""
    generator = torch.Generator().manual_seed(1)
    return [MODELS[name][1](generator) for _ in range(rows)]
