"""Models of images and sounds under the stock Trainer."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import Seq2SeqTrainingArguments

from hf_trainer import Seq2SeqTrainer, Trainer
from tests.programs import data
from tests.programs.hf_language import accuracy, arguments

_MELS, _FRAMES = 8, 32


def pixels_of(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Makes a batch of images."""
    return {
        "pixel_values": torch.stack([sample["pixel_values"] for sample in samples]),
        "labels": torch.tensor([sample["labels"] for sample in samples]),
    }


def vit(folder: str, **xla: Any) -> Trainer:
    config = transformers.ViTConfig(
        image_size=8,
        patch_size=2,
        num_channels=1,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        num_labels=10,
    )
    return Trainer(
        model=transformers.ViTForImageClassification(config),
        args=arguments(
            folder,
            remove_unused_columns=False,
            eval_strategy="epoch",
            save_strategy="epoch",
            load_best_model_at_end=True,
            metric_for_best_model="accuracy",
            warmup_steps=2,
        ),
        data_collator=pixels_of,
        train_dataset=data.images(64),
        eval_dataset=data.images(32, skip=64),
        compute_metrics=accuracy,
        **xla,
    )


def convnext(folder: str, **xla: Any) -> Trainer:
    config = transformers.ConvNextConfig(
        num_channels=3, patch_size=2, num_stages=2, hidden_sizes=[8, 16], depths=[1, 1], num_labels=10
    )
    return Trainer(
        model=transformers.ConvNextForImageClassification(config),
        args=arguments(folder, remove_unused_columns=False, weight_decay=0.05, lr_scheduler_type="cosine"),
        data_collator=pixels_of,
        train_dataset=data.images(64, channels=3),
        **xla,
    )


def audio_classification(folder: str, **xla: Any) -> Trainer:
    config = transformers.ASTConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        patch_size=4,
        frequency_stride=4,
        time_stride=4,
        max_length=_FRAMES,
        num_mel_bins=_MELS,
        num_labels=3,
    )
    spectrograms = [
        {**sound, "input_values": sound["input_values"].reshape(_FRAMES, _MELS)}
        for sound in data.sounds(64, _FRAMES * _MELS)
    ]
    return Trainer(
        model=transformers.ASTForAudioClassification(config),
        args=arguments(folder, eval_strategy="epoch", gradient_accumulation_steps=1, warmup_steps=2),
        train_dataset=spectrograms,
        eval_dataset=spectrograms[:16],
        compute_metrics=accuracy,
        **xla,
    )


class SpeechCollator:
    """Pads the targets of a batch, and leaves the padding out of the loss."""

    def __call__(self, samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        targets = torch.nn.utils.rnn.pad_sequence(
            [torch.tensor(sample["labels"]) for sample in samples], batch_first=True, padding_value=-100
        )
        return {
            "input_features": torch.stack([sample["input_features"] for sample in samples]),
            "labels": targets,
        }


def speech_to_text(folder: str, **xla: Any) -> Seq2SeqTrainer:
    config = transformers.WhisperConfig(
        vocab_size=data.VOCABULARY,
        num_mel_bins=_MELS,
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        max_source_positions=_FRAMES // 2,
        max_target_positions=16,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=1,
        decoder_start_token_id=2,
    )
    # Each batch has a target of full length, so that all have one shape.
    samples = [
        {
            "input_features": sound["input_values"].reshape(_MELS, _FRAMES),
            "labels": [3 + 5 * sound["labels"]] * (6 if index % 4 else 8),
        }
        for index, sound in enumerate(data.sounds(64, _FRAMES * _MELS))
    ]
    return Seq2SeqTrainer(
        model=transformers.WhisperForConditionalGeneration(config),
        args=Seq2SeqTrainingArguments(
            folder,
            per_device_train_batch_size=16,
            num_train_epochs=4,
            learning_rate=1e-3,
            warmup_steps=5,
            logging_steps=1,
            train_sampling_strategy="sequential",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            remove_unused_columns=False,
        ),
        train_dataset=samples,
        data_collator=SpeechCollator(),
        **xla,
    )
