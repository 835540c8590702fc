"""Models of transformers under the stock Trainer, as its task guides train them: texts, images, sounds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import transformers
from transformers import (
    ByT5Tokenizer,
    DataCollatorForLanguageModeling,
    DataCollatorForSeq2Seq,
    EarlyStoppingCallback,
    EvalPrediction,
    Seq2SeqTrainingArguments,
    TrainingArguments,
)

from hf_trainer import Seq2SeqTrainer, Trainer
from tests.programs import data

_SIZES: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
_CONFIG: dict[str, Any] = {
    **_SIZES,
    **{"vocab_size": data.VOCABULARY, "max_position_embeddings": 32},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1},
}
_DISTILBERT: dict[str, Any] = {
    **{"vocab_size": data.VOCABULARY, "max_position_embeddings": 32},
    **{"dim": 16, "n_layers": 1, "n_heads": 2, "hidden_dim": 32},
}
_MELS, _FRAMES = 8, 32
# Makes a trainer, given an output folder and XLA options.
Make = Callable[..., Any]


def arguments(folder: str, kind: type[TrainingArguments] = TrainingArguments, **options: Any) -> TrainingArguments:
    """The training arguments of a guide; each step is logged, and nothing is reported to a service."""
    values: dict[str, Any] = {
        "per_device_train_batch_size": 8,
        "per_device_eval_batch_size": 8,
        "num_train_epochs": 2,
        "learning_rate": 2e-3,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    return kind(folder, **{**values, **options})


def _guide(
    model: Callable[[], Any],
    rows: Callable[..., Any],
    more: Callable[[Any], dict[str, Any]] = lambda model: {},
    *,
    held_out: dict[str, Any] | None = None,
    seq2seq: bool = False,
    **options: Any,
) -> Make:
    """A script.

    Args:
        model: makes the model.
        rows: makes so many rows of data.
        more: further options of the trainer, given the model.
        held_out: how rows to evaluate with are made, if there are any.
        seq2seq: whether it is a `Seq2SeqTrainer`.
        options: training arguments.
    """

    def make(folder: str, **xla: Any) -> Any:
        made = model()
        args = arguments(folder, Seq2SeqTrainingArguments if seq2seq else TrainingArguments, **options)
        evaluated = {} if held_out is None else {"eval_dataset": rows(**held_out)}
        kind = Seq2SeqTrainer if seq2seq else Trainer
        return kind(model=made, args=args, train_dataset=rows(64), **evaluated, **more(made), **xla)

    return make


def tokenizer() -> ByT5Tokenizer:
    """One token per byte, with a token to mask others by."""
    made = ByT5Tokenizer(extra_ids=125)
    made.add_special_tokens({"mask_token": "<extra_id_0>"})
    return made


def _metrics(predicted: EvalPrediction) -> dict[str, float]:
    """The share of right classes, where there is one."""
    logits = predicted.predictions[0] if isinstance(predicted.predictions, tuple) else predicted.predictions
    labels = np.asarray(predicted.label_ids)
    right = (np.argmax(logits, axis=-1) == labels)[labels != -100]
    return {"accuracy": float(right.mean())}


def _accuracy(model: Any) -> dict[str, Any]:
    return {"compute_metrics": _metrics}


# ---- texts -------------------------------------------------------------------------------------------


def _continued(model: Any) -> dict[str, Any]:
    return {"data_collator": DataCollatorForLanguageModeling(tokenizer(), mlm=False)}


def _written_length(predicted: EvalPrediction) -> dict[str, float]:
    tokens = np.where(predicted.predictions != -100, predicted.predictions, 0)
    texts = tokenizer().batch_decode(tokens, skip_special_tokens=True)
    return {"length": float(np.mean([len(text) for text in texts]))}


def _translated(model: Any) -> dict[str, Any]:
    collator = DataCollatorForSeq2Seq(tokenizer(), model=model)
    return {"data_collator": collator, "processing_class": tokenizer(), "compute_metrics": _written_length}


def _model(kind: str, **options: Any) -> Callable[[], Any]:
    def make() -> Any:
        model = getattr(transformers, kind)
        return model(model.config_class(**options))

    return make


_BEST = {"load_best_model_at_end": True, "metric_for_best_model": "accuracy", "save_strategy": "epoch"}
_EACH_EPOCH = {"eval_strategy": "epoch"}

gpt2 = _guide(
    _model(
        "GPT2LMHeadModel",
        **{"vocab_size": data.VOCABULARY, "n_positions": 32, "n_embd": 16, "n_layer": 1, "n_head": 2},
        **{"bos_token_id": 1, "eos_token_id": 1},
    ),
    data.language,
    lambda model: {**_continued(model), "processing_class": tokenizer()},
    **{"weight_decay": 0.01, "warmup_steps": 4, "lr_scheduler_type": "cosine"},
)
llama = _guide(
    _model("LlamaForCausalLM", **_CONFIG, num_key_value_heads=1),
    data.language,
    _continued,
    **{"num_train_epochs": 3, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2},
)
qwen2 = _guide(
    _model("Qwen2ForCausalLM", **_CONFIG, num_key_value_heads=1),
    data.language,
    _continued,
    held_out={"number": 16, "skip": 64},
    **{"eval_strategy": "steps", "eval_steps": 5, "bf16": False, "max_grad_norm": 0.3},
)
mistral = _guide(
    _model("MistralForCausalLM", **_CONFIG, num_key_value_heads=1, sliding_window=8),
    data.language,
    _continued,
    **{"max_steps": 15, "lr_scheduler_type": "constant_with_warmup", "warmup_steps": 3, "optim": "sgd"},
)
t5 = _guide(
    _model(
        "T5ForConditionalGeneration",
        **{"vocab_size": data.VOCABULARY, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2},
        decoder_start_token_id=0,
    ),
    data.reversed_words,
    _translated,
    held_out={"number": 8, "skip": 64},
    seq2seq=True,
    **{**_EACH_EPOCH, "label_smoothing_factor": 0.1, "predict_with_generate": True, "generation_max_length": 8},
)
bert = _guide(
    _model("BertForSequenceClassification", **_CONFIG, num_labels=5),
    data.classified,
    lambda model: {**_accuracy(model), "callbacks": [EarlyStoppingCallback(early_stopping_patience=2)]},
    held_out={"number": 16, "skip": 64},
    **{**_EACH_EPOCH, **_BEST, "save_total_limit": 1, "weight_decay": 0.01},
)
distilbert = _guide(
    _model("DistilBertForSequenceClassification", **_DISTILBERT, num_labels=5),
    data.classified,
    **{"label_smoothing_factor": 0.1, "max_steps": 16, "warmup_steps": 2},
)
token_classification = _guide(
    _model("BertForTokenClassification", **_CONFIG, num_labels=3),
    data.tagged,
    _accuracy,
    held_out={"number": 16},
    **{**_EACH_EPOCH, "lr_scheduler_type": "polynomial"},
)
question_answering = _guide(_model("DistilBertForQuestionAnswering", **_DISTILBERT), data.answered, warmup_steps=3)
masked_language = _guide(
    _model("RobertaForMaskedLM", **_CONFIG),
    data.language,
    lambda model: {"data_collator": DataCollatorForLanguageModeling(tokenizer(), mlm_probability=0.15)},
    held_out={"number": 16, "skip": 64},
    **{**_EACH_EPOCH, "lr_scheduler_type": "cosine"},
)
multiple_choice = _guide(
    _model("BertForMultipleChoice", **_CONFIG), data.chosen, _accuracy, held_out={"number": 16}, **_EACH_EPOCH
)


# ---- images and sounds -------------------------------------------------------------------------------


def pixels_of(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Makes a batch of images."""
    return {
        "pixel_values": torch.stack([sample["pixel_values"] for sample in samples]),
        "labels": torch.tensor([sample["labels"] for sample in samples]),
    }


def _images_in_color(number: int) -> list[dict[str, Any]]:
    return data.images(number, channels=3)


def _spectrograms(number: int) -> list[dict[str, Any]]:
    sounds = data.sounds(number, _FRAMES * _MELS)
    return [{**sound, "input_values": sound["input_values"].reshape(_FRAMES, _MELS)} for sound in sounds]


def _speech(number: int) -> list[dict[str, Any]]:
    # Each batch has a target of full length, so that all have one shape.
    return [
        {
            "input_features": sound["input_values"].reshape(_MELS, _FRAMES),
            "labels": [3 + 5 * sound["labels"]] * (6 if index % 4 else 8),
        }
        for index, sound in enumerate(data.sounds(number, _FRAMES * _MELS))
    ]


def _of_speech(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Pads the targets of a batch, and leaves the padding out of the loss."""
    targets = [torch.tensor(sample["labels"]) for sample in samples]
    return {
        "input_features": torch.stack([sample["input_features"] for sample in samples]),
        "labels": torch.nn.utils.rnn.pad_sequence(targets, batch_first=True, padding_value=-100),
    }


vit = _guide(
    _model("ViTForImageClassification", **_SIZES, image_size=8, patch_size=2, num_channels=1, num_labels=10),
    data.images,
    lambda model: {**_accuracy(model), "data_collator": pixels_of},
    held_out={"number": 32, "skip": 64},
    **{**_EACH_EPOCH, **_BEST, "remove_unused_columns": False, "warmup_steps": 2},
)
convnext = _guide(
    _model(
        "ConvNextForImageClassification",
        **{"num_channels": 3, "patch_size": 2, "num_stages": 2, "hidden_sizes": [8, 16], "depths": [1, 1]},
        num_labels=10,
    ),
    _images_in_color,
    lambda model: {"data_collator": pixels_of},
    **{"remove_unused_columns": False, "weight_decay": 0.05, "lr_scheduler_type": "cosine"},
)
audio_classification = _guide(
    _model(
        "ASTForAudioClassification",
        **{**_SIZES, "patch_size": 4, "frequency_stride": 4, "time_stride": 4, "max_length": _FRAMES},
        **{"num_mel_bins": _MELS, "num_labels": 3},
    ),
    _spectrograms,
    _accuracy,
    held_out={"number": 16},
    **{**_EACH_EPOCH, "gradient_accumulation_steps": 1, "warmup_steps": 2},
)
speech_to_text = _guide(
    _model(
        "WhisperForConditionalGeneration",
        **{"vocab_size": data.VOCABULARY, "num_mel_bins": _MELS, "d_model": 16, "decoder_start_token_id": 2},
        **{"encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 32},
        **{"decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 32},
        **{"max_source_positions": _FRAMES // 2, "max_target_positions": 16},
        **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1},
    ),
    _speech,
    lambda model: {"data_collator": _of_speech},
    seq2seq=True,
    **{"per_device_train_batch_size": 16, "num_train_epochs": 4, "learning_rate": 1e-3, "warmup_steps": 5},
    **{"train_sampling_strategy": "sequential", "remove_unused_columns": False},
)
