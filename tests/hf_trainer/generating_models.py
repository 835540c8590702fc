"""Tiny models that generate in a way of their own, with inputs for `generate`. Call them only inside isolated tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf

_LENGTH = 6
_Made = tuple[Any, dict[str, Any]]
_TEXT: dict[str, Any] = {"vocab_size": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def _tokens(rows: int = 2, length: int = 5) -> torch.Tensor:
    return torch.randint(3, 64, (rows, length), generator=torch.Generator().manual_seed(0))


def _noise(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def whisper() -> _Made:
    """Takes `input_features`; has no argument `inputs`."""
    hf.set_seed(0)
    model = hf.WhisperForConditionalGeneration(
        hf.WhisperConfig(
            **_TEXT,
            d_model=32,
            encoder_layers=1,
            decoder_layers=1,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            encoder_ffn_dim=64,
            decoder_ffn_dim=64,
            num_mel_bins=8,
            max_source_positions=20,
            max_target_positions=16,
            decoder_start_token_id=1,
            suppress_tokens=None,
            begin_suppress_tokens=None,
        )
    )
    return model, {"input_features": _noise(2, 8, 40), "max_new_tokens": _LENGTH}


def bert_pair() -> _Made:
    """Its decoder needs the length of the cache as a number."""
    hf.set_seed(0)
    bert = {
        "vocab_size": 64,
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
        "max_position_embeddings": 32,
    }
    config = hf.EncoderDecoderConfig.from_encoder_decoder_configs(hf.BertConfig(**bert), hf.BertConfig(**bert))
    model = hf.EncoderDecoderModel(config=config)
    for settings in (model.config, model.generation_config):
        settings.decoder_start_token_id, settings.pad_token_id, settings.eos_token_id = 1, 0, 2
    tokens = _tokens()
    return model, {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "max_new_tokens": _LENGTH}


def blip() -> _Made:
    """Encodes the image outside of its `forward`, then generates with its decoder."""
    hf.set_seed(0)
    layers = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {**layers, **_TEXT, "sep_token_id": 2, "max_position_embeddings": 32, "encoder_hidden_size": 16}
    vision = {**layers, "image_size": 8, "patch_size": 4}
    model = hf.BlipForConditionalGeneration(hf.BlipConfig(text_config=text, vision_config=vision, projection_dim=16))
    tokens = torch.tensor([[1, 5, 6, 2]]).repeat(2, 1)
    return model, {
        "pixel_values": _noise(2, 3, 8, 8),
        "input_ids": tokens,
        "attention_mask": torch.ones_like(tokens),
        "max_new_tokens": _LENGTH,
    }


def kosmos2() -> _Made:
    """Calls single layers of its parts."""
    hf.set_seed(0)
    text = {
        **_TEXT,
        "embed_dim": 16,
        "layers": 1,
        "ffn_dim": 16,
        "attention_heads": 2,
        "max_position_embeddings": 64,
    }
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 8,
        "patch_size": 4,
    }
    config = hf.Kosmos2Config(text_config=text, vision_config=vision, latent_query_num=2)
    model = hf.Kosmos2ForConditionalGeneration(config)
    tokens = _tokens(2, 6)
    mask = torch.zeros_like(tokens)
    mask[:, 1:3] = 1
    return model, {
        "pixel_values": _noise(2, 3, 8, 8),
        "input_ids": tokens,
        "image_embeds_position_mask": mask,
        "attention_mask": torch.ones_like(tokens),
        "max_new_tokens": _LENGTH,
    }


def parakeet() -> _Made:
    """Generates by one `forward` (CTC), which gets the arguments of `generate`."""
    hf.set_seed(0)
    encoder = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
        "num_mel_bins": 16,
        "conv_kernel_size": 3,
        "subsampling_conv_channels": 8,
        "max_position_embeddings": 64,
    }
    model = hf.ParakeetForCTC(hf.ParakeetCTCConfig(vocab_size=64, pad_token_id=0, encoder_config=encoder))
    return model, {"input_features": _noise(2, 48, 16), "attention_mask": torch.ones(2, 48, dtype=torch.long)}


def pop2piano() -> _Made:
    """Computes its input from the features and the composer."""
    hf.set_seed(0)
    model = hf.Pop2PianoForConditionalGeneration(
        hf.Pop2PianoConfig(
            vocab_size=64,
            composer_vocab_size=2,
            d_model=16,
            d_kv=8,
            d_ff=16,
            num_layers=1,
            num_decoder_layers=1,
            num_heads=2,
            decoder_start_token_id=0,
        )
    )
    model.generation_config.composer_to_feature_token = {"composer1": 0, "composer2": 1}
    return model, {"input_features": _noise(2, 5, 16), "composer": "composer1", "max_new_tokens": _LENGTH}


def seamless() -> _Made:
    """Makes the tokens that it starts with on its own device."""
    hf.set_seed(0)
    model = hf.SeamlessM4TForTextToText(
        hf.SeamlessM4TConfig(
            **_TEXT,
            hidden_size=16,
            encoder_layers=1,
            encoder_ffn_dim=16,
            encoder_attention_heads=2,
            decoder_layers=1,
            decoder_ffn_dim=16,
            decoder_attention_heads=2,
            max_position_embeddings=64,
            decoder_start_token_id=2,
        )
    )
    model.generation_config.text_decoder_lang_to_code_id = {"eng": 5}
    return model, {"input_ids": _tokens(), "tgt_lang": "eng", "max_new_tokens": _LENGTH}


MODELS: dict[str, Callable[[], _Made]] = {
    "whisper": whisper,
    "bert_pair": bert_pair,
    "blip": blip,
    "kosmos2": kosmos2,
    "parakeet": parakeet,
    "pop2piano": pop2piano,
    "seamless": seamless,
}
# It assigns through a boolean index.
IN_PIECES = ("kosmos2",)
