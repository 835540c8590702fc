"""Small models of transformers, one of each family that the tests train, without dropout."""

from __future__ import annotations

from typing import Any

import torch
import transformers as hf

VOCABULARY = 64
_LAYERS: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
_TEXT: dict[str, Any] = {"vocab_size": VOCABULARY, "max_position_embeddings": 64}
_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_PAIR: dict[str, Any] = {
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 16,
    "decoder_ffn_dim": 16,
    "dropout": 0.0,
}
# The class of the model, that of its configuration, and the configuration.
_FAMILIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "gpt2": (
        hf.GPT2LMHeadModel,
        hf.GPT2Config,
        {
            **{"vocab_size": VOCABULARY, "n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2},
            **{"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0},
        },
    ),
    "gpt-neo": (
        hf.GPTNeoForCausalLM,
        hf.GPTNeoConfig,
        {
            **{**_TEXT, "hidden_size": 16, "intermediate_size": 16, "num_layers": 2, "num_heads": 2},
            **{"attention_types": [[["global", "local"], 1]], "window_size": 8, "attention_dropout": 0.0},
            **{"resid_dropout": 0.0, "embed_dropout": 0.0, "bos_token_id": 0, "eos_token_id": 0},
        },
    ),
    "llama": (hf.LlamaForCausalLM, hf.LlamaConfig, {**_LAYERS, **_TEXT}),
    "mixtral": (hf.MixtralForCausalLM, hf.MixtralConfig, {**_LAYERS, **_TEXT, "num_local_experts": 4}),
    "bert": (hf.BertForSequenceClassification, hf.BertConfig, {**_LAYERS, **_TEXT, **_DROPOUT}),
    "vit": (hf.ViTForImageClassification, hf.ViTConfig, {**_LAYERS, **_DROPOUT, "image_size": 8, "patch_size": 4}),
    "resnet": (
        hf.ResNetForImageClassification,
        hf.ResNetConfig,
        {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1], "layer_type": "basic"},
    ),
    "t5": (
        hf.T5ForConditionalGeneration,
        hf.T5Config,
        {
            **{"vocab_size": VOCABULARY, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2},
            **{"dropout_rate": 0.0, "decoder_start_token_id": 0},
        },
    ),
    "bart": (
        hf.BartForConditionalGeneration,
        hf.BartConfig,
        {**_TEXT, **_PAIR, "decoder_start_token_id": 2, "forced_eos_token_id": None},
    ),
    "whisper": (
        hf.WhisperForConditionalGeneration,
        hf.WhisperConfig,
        {
            **{"vocab_size": VOCABULARY, **_PAIR, "num_mel_bins": 8, "max_source_positions": 8},
            **{"max_target_positions": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
            **{"decoder_start_token_id": 1, "suppress_tokens": None, "begin_suppress_tokens": None},
        },
    ),
}


def tiny(family: str, *, kind: Any = None, seed: int = 0, **options: Any) -> Any:
    """A model, the same at each call.

    Args:
        family: a key of the table above.
        kind: another class for it.
        seed: of its weights.
        **options: of its configuration.
    """
    usual, config, values = _FAMILIES[family]
    torch.manual_seed(seed)
    return (kind or usual)(config(**{**values, **options}))


_SIZES_BY_NAME: dict[str, Any] = {
    **{"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
    },
    **{"n_positions": 64, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "encoder_layers": 2},
    **{"decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 64},
    **{"decoder_ffn_dim": 64, "ffn_dim": 64, "word_embed_proj_dim": 32, "dim": 32, "n_layers": 2, "n_heads": 4},
    **{"hidden_dim": 64, "embedding_size": 32, "head_dim": 8, "decoder_start_token_id": 2, "bos_token_id": 1},
    **{"eos_token_id": 2, "num_local_experts": 4, "num_experts": 4, "moe_intermediate_size": 32, "rotary_dim": 4},
    **{"attention_types": [[["global", "local"], 1]], "window_size": 8, "num_labels": 3},
}
_MODEL_TYPES = {
    "gemma3": "gemma3_text",
    "megatron_bert": "megatron-bert",
    "deberta_v2": "deberta-v2",
    "xlm_roberta": "xlm-roberta",
}


def config_of(family: str) -> Any:
    """A config with small sizes of a family of transformers (a folder of its models), whatever sizes are called."""
    kind, options = type(hf.AutoConfig.for_model(_MODEL_TYPES.get(family, family))), dict(_SIZES_BY_NAME)
    while True:
        try:
            return kind(**options)
        except (TypeError, ValueError, AttributeError) as error:
            # Some have fixed sizes, or names of their own for them.
            del options[next(name for name in options if name in str(error))]
