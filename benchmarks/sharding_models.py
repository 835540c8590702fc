"""Models of the families that sharding is measured with, in any width and without dropout, and batches for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf

VOCABULARY, ROWS, LENGTH, LABELS = 4096, 16, 128, 16
Batch = dict[str, torch.Tensor]
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def _sizes(width: int, layers: int) -> dict[str, Any]:
    return {
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": 8,
    }


def _gpt2(width: int, layers: int) -> Any:
    config = hf.GPT2Config(
        n_embd=width,
        n_layer=layers,
        n_head=8,
        vocab_size=VOCABULARY,
        n_positions=LENGTH,
        attn_pdrop=0.0,
        embd_pdrop=0.0,
        resid_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    return hf.GPT2LMHeadModel(config)


def _llama(width: int, layers: int) -> Any:
    sizes = _sizes(width, layers)
    return hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, vocab_size=VOCABULARY, max_position_embeddings=LENGTH))


def _gpt_neo(width: int, layers: int) -> Any:
    config = hf.GPTNeoConfig(
        hidden_size=width,
        num_layers=layers,
        attention_types=[[["global", "local"], layers // 2]],
        num_heads=8,
        window_size=LENGTH // 4,
        vocab_size=VOCABULARY,
        max_position_embeddings=LENGTH,
        intermediate_size=4 * width,
        attention_dropout=0.0,
        embed_dropout=0.0,
        resid_dropout=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    return hf.GPTNeoForCausalLM(config)


def _mixtral(width: int, layers: int) -> Any:
    sizes = {**_sizes(width, layers), "intermediate_size": 2 * width}
    return hf.MixtralForCausalLM(
        hf.MixtralConfig(
            **sizes, vocab_size=VOCABULARY, num_key_value_heads=8, num_local_experts=8, max_position_embeddings=LENGTH
        )
    )


def _bert(width: int, layers: int) -> Any:
    sizes = _sizes(width, layers)
    return hf.BertForSequenceClassification(
        hf.BertConfig(**sizes, **_NO_DROPOUT, vocab_size=VOCABULARY, num_labels=LABELS)
    )


def _t5(width: int, layers: int) -> Any:
    config = hf.T5Config(
        d_model=width,
        d_ff=4 * width,
        d_kv=width // 8,
        num_layers=layers,
        num_heads=8,
        vocab_size=VOCABULARY,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    return hf.T5ForConditionalGeneration(config)


def _vit(width: int, layers: int) -> Any:
    return hf.ViTForImageClassification(
        hf.ViTConfig(**_sizes(width, layers), **_NO_DROPOUT, image_size=32, patch_size=4, num_labels=LABELS)
    )


def _resnet(width: int, layers: int) -> Any:
    hidden = [width // 4, width // 2, width]
    config = hf.ResNetConfig(
        embedding_size=width // 4,
        hidden_sizes=hidden,
        depths=[layers] * len(hidden),
        layer_type="basic",
        num_labels=LABELS,
    )
    return hf.ResNetForImageClassification(config)


def _language(rows: int) -> Batch:
    tokens = torch.ones(rows, LENGTH, dtype=torch.long)
    return {"input_ids": tokens, "labels": tokens.clone()}


def _sentences(rows: int) -> Batch:
    return {"input_ids": torch.ones(rows, LENGTH, dtype=torch.long), "labels": torch.zeros(rows, dtype=torch.long)}


def _images(rows: int) -> Batch:
    return {"pixel_values": torch.zeros(rows, 3, 32, 32), "labels": torch.zeros(rows, dtype=torch.long)}


FAMILIES: dict[str, tuple[Callable[[int, int], Any], Callable[[int], Batch]]] = {
    "gpt2": (_gpt2, _language),
    "llama": (_llama, _language),
    "gpt_neo": (_gpt_neo, _language),
    "mixtral": (_mixtral, _language),
    "bert": (_bert, _sentences),
    "t5": (_t5, _language),
    "vit": (_vit, _images),
    "resnet": (_resnet, _images),
}


def build(name: str, *, width: int, layers: int = 2, rows: int = ROWS) -> tuple[Any, Batch]:
    """A model with random weights on the host, and a batch with labels.

    Args:
        name: one of `FAMILIES`.
        width: of the hidden states; of a ResNet, of its last stage.
        layers: of a ResNet, in each of three stages.
        rows: of the batch.
    """
    make, batch = FAMILIES[name]
    return make(width, layers), batch(rows)
