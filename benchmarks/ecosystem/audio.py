"""Models of sound of transformers, with sounds and transcripts of different lengths."""

from __future__ import annotations

import functools
from typing import Any

import torch

from benchmarks.zoo import (
    BATCH,
    CONVOLUTIONS,
    LAYERS,
    MLP,
    NO_ACTIVATION_DROPOUT,
    NO_DROPOUT,
    PADDED,
    POSITIONS,
    SIZES,
    TOKENS,
    VOCABULARY,
    WAVE_DROPOUT,
    WIDTHS,
    Batch,
)
from benchmarks.zoo import of_transformers as of

_SAMPLES, _LETTERS = 400, 6
_ENCODER: dict[str, Any] = {
    **{**SIZES, **MLP, **NO_DROPOUT, **WAVE_DROPOUT},
    **{"vocab_size": VOCABULARY, "apply_spec_augment": False, "ctc_loss_reduction": "mean"},
}
_WAVE: dict[str, Any] = {**_ENCODER, **CONVOLUTIONS, **POSITIONS}
_MASKS = {"mask_time_prob": 0.2, "mask_time_length": 2, "mask_feature_prob": 0.1, "mask_feature_length": 2}
_SEQ2SEQ: dict[str, Any] = {
    **{**TOKENS, **PADDED, **LAYERS, **WIDTHS, **NO_ACTIVATION_DROPOUT},
    **{"decoder_start_token_id": 2, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0},
}
_SPEECH_T5: dict[str, Any] = {
    **{key: value for key, value in _SEQ2SEQ.items() if key != "dropout"},
    **{key: CONVOLUTIONS[key] for key in ("conv_dim", "conv_kernel", "conv_stride")},
    **{**POSITIONS, "hidden_size": 32, "apply_spec_augment": False, "num_mel_bins": 8},
    **{"positional_dropout": 0.0, "hidden_dropout": 0.0, "speaker_embedding_dim": 4, "reduction_factor": 2},
    **{"speech_decoder_prenet_dropout": 0.0, "speech_decoder_postnet_dropout": 0.0},
    **{"speech_decoder_prenet_units": 16, "speech_decoder_postnet_units": 16, "speech_decoder_postnet_layers": 2},
}
_SEAMLESS = {
    **{"hidden_size": 32, "speech_encoder_layers": 2, "speech_encoder_attention_heads": 4},
    **{"speech_encoder_intermediate_size": 48, "feature_projection_input_dim": 8, "conv_depthwise_kernel_size": 3},
    **{**POSITIONS, "speech_encoder_layerdrop": 0.0},
    **{"adaptor_kernel_size": 2, "adaptor_stride": 2, "adaptor_dropout": 0.0, "max_source_positions": 64},
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


_of_frames = functools.partial(_frames, 8)

AUDIO = (
    of("Wav2Vec2 (CTC, padded)", "Wav2Vec2ForCTC", _transcribed, _WAVE),
    of("HuBERT (CTC, padded)", "HubertForCTC", _transcribed, _WAVE),
    of("WavLM (CTC, padded)", "WavLMForCTC", _transcribed, _WAVE),
    of(
        *("Wav2Vec2-BERT (CTC, padded)", "Wav2Vec2BertForCTC", _of_frames, _ENCODER),
        **{"feature_projection_input_dim": 8, "conv_depthwise_kernel_size": 3, "conformer_conv_dropout": 0.0},
    ),
    of("Wav2Vec2 (CTC, SpecAugment)", "Wav2Vec2ForCTC", _transcribed, _WAVE, _MASKS, apply_spec_augment=True),
    of(
        *("Whisper", "WhisperForConditionalGeneration", _spectrogram, _SEQ2SEQ),
        **{"d_model": 32, "num_mel_bins": 8, "max_source_positions": 20, "max_target_positions": 16},
    ),
    of(
        *("Speech2Text", "Speech2TextForConditionalGeneration", _of_frames, _SEQ2SEQ),
        **{"d_model": 32, "conv_channels": 16, "input_feat_per_channel": 8},
        **{"max_source_positions": 64, "max_target_positions": 16},
    ),
    of("SpeechT5 (speech to text)", "SpeechT5ForSpeechToText", _transcribed, _SPEECH_T5),
    of("SpeechT5 (text to speech)", "SpeechT5ForTextToSpeech", _spoken, _SPEECH_T5),
    of("Seamless M4T (speech to text)", "SeamlessM4TForSpeechToText", _of_frames, _SEQ2SEQ, _SEAMLESS),
)
