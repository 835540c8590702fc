"""Models of sound of transformers, with sounds and transcripts of different lengths."""

from __future__ import annotations

import functools
from typing import Any

import torch
import transformers
from torch import nn

from benchmarks.ecosystem.model import Model
from benchmarks.zoo import BATCH, VOCABULARY, Batch

_SAMPLES, _LETTERS = 400, 6
_SIZES: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
_WAVE: dict[str, Any] = {
    **_SIZES,
    "vocab_size": VOCABULARY,
    "conv_dim": (16, 16),
    "conv_kernel": (10, 3),
    "conv_stride": (5, 2),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 4,
    "apply_spec_augment": False,
    "ctc_loss_reduction": "mean",
    **dict.fromkeys(("hidden_dropout", "attention_dropout", "activation_dropout"), 0.0),
    **dict.fromkeys(("feat_proj_dropout", "final_dropout", "layerdrop"), 0.0),
}
_SEQ2SEQ: dict[str, Any] = {
    **{"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2},
    **{"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4},
    **{"encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0},
    **dict.fromkeys(("dropout", "attention_dropout", "activation_dropout"), 0.0),
}


def _transcripts(generator: torch.Generator) -> torch.Tensor:
    """Texts of other lengths in each batch, padded with -100."""
    texts = torch.randint(3, VOCABULARY, (BATCH, _LETTERS), generator=generator)
    lengths = torch.randint(1, _LETTERS + 1, (BATCH, 1), generator=generator)
    return texts.masked_fill(torch.arange(_LETTERS) >= lengths, -100)


def _waves(generator: torch.Generator) -> Batch:
    """Sounds of other lengths in each batch."""
    lengths = torch.randint(_SAMPLES // 2, _SAMPLES + 1, (BATCH, 1), generator=generator)
    mask = torch.arange(_SAMPLES) < lengths
    return {
        "input_values": torch.randn(BATCH, _SAMPLES, generator=generator) * mask,
        "attention_mask": mask.long(),
    }


def _transcribed(generator: torch.Generator) -> Batch:
    return {**_waves(generator), "labels": _transcripts(generator)}


def _spectrogram(generator: torch.Generator, *, bins: int = 8, frames: int = 40) -> Batch:
    features = torch.randn(BATCH, bins, frames, generator=generator)
    return {"input_features": features, "labels": _transcripts(generator)}


def _frames(bins: int, generator: torch.Generator) -> Batch:
    """Spectrograms whose first dimension is time, of other lengths in each batch."""
    lengths = torch.randint(20, 41, (BATCH, 1), generator=generator)
    mask = torch.arange(40) < lengths
    return {
        "input_features": torch.randn(BATCH, 40, bins, generator=generator) * mask[..., None],
        "attention_mask": mask.long(),
        "labels": _transcripts(generator),
    }


def _of(stem: str, head: str, options: dict[str, Any], **more: Any) -> nn.Module:
    config = getattr(transformers, f"{stem}Config")(**options, **more)
    net: nn.Module = getattr(transformers, f"{stem}{head}")(config)
    return net


def _augmented() -> nn.Module:
    masks = {"mask_time_prob": 0.2, "mask_time_length": 2, "mask_feature_prob": 0.1, "mask_feature_length": 2}
    return _of("Wav2Vec2", "ForCTC", {**_WAVE, "apply_spec_augment": True}, **masks)


_SPEECH_T5: dict[str, Any] = {
    **{key: value for key, value in _SEQ2SEQ.items() if key != "dropout"},
    **{key: _WAVE[key] for key in ("conv_dim", "conv_kernel", "conv_stride", "hidden_size", "apply_spec_augment")},
    **{"num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 4, "num_mel_bins": 8},
    **{"positional_dropout": 0.0, "hidden_dropout": 0.0, "speaker_embedding_dim": 4, "reduction_factor": 2},
    **{"speech_decoder_prenet_dropout": 0.0, "speech_decoder_postnet_dropout": 0.0},
    **{"speech_decoder_prenet_units": 16, "speech_decoder_postnet_units": 16, "speech_decoder_postnet_layers": 2},
}


def _spoken(generator: torch.Generator) -> Batch:
    """Texts and the spectrograms of their sound, padded with -100."""
    texts = torch.randint(3, VOCABULARY, (BATCH, 10), generator=generator)
    lengths = torch.randint(5, 11, (BATCH, 1, 1), generator=generator) * 2
    sound = torch.randn(BATCH, 20, 8, generator=generator)
    return {
        "input_ids": texts,
        "attention_mask": torch.ones_like(texts),
        "labels": sound.masked_fill(torch.arange(20)[None, :, None] >= lengths, -100.0),
        "speaker_embeddings": torch.randn(BATCH, 4, generator=generator),
    }


def _seamless() -> nn.Module:
    return _of(
        "SeamlessM4T",
        "ForSpeechToText",
        {
            **_SEQ2SEQ,
            **{"hidden_size": 32, "speech_encoder_layers": 2, "speech_encoder_attention_heads": 4},
            **{
                "speech_encoder_intermediate_size": 48,
                "feature_projection_input_dim": 8,
                "conv_depthwise_kernel_size": 3,
            },
            **{"num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 4, "speech_encoder_layerdrop": 0.0},
            **{"adaptor_kernel_size": 2, "adaptor_stride": 2, "adaptor_dropout": 0.0, "max_source_positions": 64},
        },
    )


def _bert_like() -> nn.Module:
    options = {
        key: value for key, value in _WAVE.items() if not key.startswith(("conv_", "num_feat_extract", "num_conv"))
    }
    return _of(
        "Wav2Vec2Bert",
        "ForCTC",
        options,
        feature_projection_input_dim=8,
        conv_depthwise_kernel_size=3,
        conformer_conv_dropout=0.0,
    )


AUDIO = (
    Model("Wav2Vec2 (CTC, padded)", functools.partial(_of, "Wav2Vec2", "ForCTC", _WAVE), _transcribed),
    Model("HuBERT (CTC, padded)", functools.partial(_of, "Hubert", "ForCTC", _WAVE), _transcribed),
    Model("WavLM (CTC, padded)", functools.partial(_of, "WavLM", "ForCTC", _WAVE), _transcribed),
    Model("Wav2Vec2-BERT (CTC, padded)", _bert_like, functools.partial(_frames, 8)),
    Model("Wav2Vec2 (CTC, SpecAugment)", _augmented, _transcribed),
    Model(
        "Whisper",
        functools.partial(
            *(_of, "Whisper", "ForConditionalGeneration", {**_SEQ2SEQ, "d_model": 32, "num_mel_bins": 8}),
            **{"max_source_positions": 20, "max_target_positions": 16},
        ),
        _spectrogram,
    ),
    Model(
        "Speech2Text",
        functools.partial(
            *(_of, "Speech2Text", "ForConditionalGeneration", {**_SEQ2SEQ, "d_model": 32, "conv_channels": 16}),
            **{"input_feat_per_channel": 8, "max_source_positions": 64, "max_target_positions": 16},
        ),
        functools.partial(_frames, 8),
    ),
    Model("SpeechT5 (speech to text)", functools.partial(_of, "SpeechT5", "ForSpeechToText", _SPEECH_T5), _transcribed),
    Model("SpeechT5 (text to speech)", functools.partial(_of, "SpeechT5", "ForTextToSpeech", _SPEECH_T5), _spoken),
    Model("Seamless M4T (speech to text)", _seamless, functools.partial(_frames, 8)),
)
