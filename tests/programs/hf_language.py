"""Language models of transformers under the stock Trainer, as its task guides train them."""

from __future__ import annotations

from typing import Any

import numpy as np
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

_CONFIG: dict[str, Any] = {
    "vocab_size": data.VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 1,
}
_DISTILBERT: dict[str, Any] = {
    "vocab_size": data.VOCABULARY,
    "dim": 16,
    "n_layers": 1,
    "n_heads": 2,
    "hidden_dim": 32,
    "max_position_embeddings": 32,
}


def arguments(folder: str, **options: Any) -> TrainingArguments:
    """The training arguments of a guide; each step is logged, and nothing is reported to a service."""
    return TrainingArguments(folder, **_options(options))


def _options(options: dict[str, Any]) -> dict[str, Any]:
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
    return {**values, **options}


def tokenizer() -> ByT5Tokenizer:
    """One token per byte, with a token to mask others by."""
    made = ByT5Tokenizer(extra_ids=125)
    made.add_special_tokens({"mask_token": "<extra_id_0>"})
    return made


def accuracy(predicted: EvalPrediction) -> dict[str, float]:
    """The share of right classes, where there is one."""
    logits = predicted.predictions[0] if isinstance(predicted.predictions, tuple) else predicted.predictions
    labels = np.asarray(predicted.label_ids)
    right = (np.argmax(logits, axis=-1) == labels)[labels != -100]
    return {"accuracy": float(right.mean())}


# ---- text that is gone on with -------------------------------------------------------------------------


def gpt2(folder: str, **xla: Any) -> Trainer:
    config = transformers.GPT2Config(
        vocab_size=data.VOCABULARY, n_positions=32, n_embd=16, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=1
    )
    return Trainer(
        model=transformers.GPT2LMHeadModel(config),
        args=arguments(folder, weight_decay=0.01, warmup_steps=4, lr_scheduler_type="cosine"),
        train_dataset=data.language(64),
        data_collator=DataCollatorForLanguageModeling(tokenizer(), mlm=False),
        processing_class=tokenizer(),
        **xla,
    )


def llama(folder: str, **xla: Any) -> Trainer:
    config = transformers.LlamaConfig(**_CONFIG, num_key_value_heads=1)
    return Trainer(
        model=transformers.LlamaForCausalLM(config),
        args=arguments(folder, num_train_epochs=3, per_device_train_batch_size=4, gradient_accumulation_steps=2),
        train_dataset=data.language(64),
        data_collator=DataCollatorForLanguageModeling(tokenizer(), mlm=False),
        **xla,
    )


def qwen2(folder: str, **xla: Any) -> Trainer:
    config = transformers.Qwen2Config(**_CONFIG, num_key_value_heads=1)
    return Trainer(
        model=transformers.Qwen2ForCausalLM(config),
        args=arguments(folder, eval_strategy="steps", eval_steps=5, bf16=False, max_grad_norm=0.3),
        train_dataset=data.language(64),
        eval_dataset=data.language(16, skip=64),
        data_collator=DataCollatorForLanguageModeling(tokenizer(), mlm=False),
        **xla,
    )


def mistral(folder: str, **xla: Any) -> Trainer:
    config = transformers.MistralConfig(**_CONFIG, num_key_value_heads=1, sliding_window=8)
    return Trainer(
        model=transformers.MistralForCausalLM(config),
        args=arguments(folder, max_steps=15, lr_scheduler_type="constant_with_warmup", warmup_steps=3, optim="sgd"),
        train_dataset=data.language(64),
        data_collator=DataCollatorForLanguageModeling(tokenizer(), mlm=False),
        **xla,
    )


# ---- text that is turned into text ---------------------------------------------------------------------


def t5(folder: str, **xla: Any) -> Seq2SeqTrainer:
    config = transformers.T5Config(
        vocab_size=data.VOCABULARY, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, decoder_start_token_id=0
    )
    model = transformers.T5ForConditionalGeneration(config)
    return Seq2SeqTrainer(
        model=model,
        args=Seq2SeqTrainingArguments(
            folder,
            **_options({"label_smoothing_factor": 0.1, "eval_strategy": "epoch", "predict_with_generate": True}),
            generation_max_length=8,
        ),
        train_dataset=data.reversed_words(64),
        eval_dataset=data.reversed_words(8, skip=64),
        data_collator=DataCollatorForSeq2Seq(tokenizer(), model=model),
        processing_class=tokenizer(),
        compute_metrics=_written_length,
        **xla,
    )


def _written_length(predicted: EvalPrediction) -> dict[str, float]:
    tokens = np.where(predicted.predictions != -100, predicted.predictions, 0)
    texts = tokenizer().batch_decode(tokens, skip_special_tokens=True)
    return {"length": float(np.mean([len(text) for text in texts]))}


# ---- texts that are classified -------------------------------------------------------------------------


def bert(folder: str, **xla: Any) -> Trainer:
    config = transformers.BertConfig(**_CONFIG, num_labels=5)
    return Trainer(
        model=transformers.BertForSequenceClassification(config),
        args=arguments(
            folder,
            eval_strategy="epoch",
            save_strategy="epoch",
            save_total_limit=1,
            load_best_model_at_end=True,
            metric_for_best_model="accuracy",
            weight_decay=0.01,
        ),
        train_dataset=data.classified(64),
        eval_dataset=data.classified(16, skip=64),
        compute_metrics=accuracy,
        callbacks=[EarlyStoppingCallback(early_stopping_patience=2)],
        **xla,
    )


def distilbert(folder: str, **xla: Any) -> Trainer:
    config = transformers.DistilBertConfig(**_DISTILBERT, num_labels=5)
    return Trainer(
        model=transformers.DistilBertForSequenceClassification(config),
        args=arguments(folder, label_smoothing_factor=0.1, max_steps=16, warmup_steps=2),
        train_dataset=data.classified(64),
        **xla,
    )


def token_classification(folder: str, **xla: Any) -> Trainer:
    config = transformers.BertConfig(**_CONFIG, num_labels=3)
    return Trainer(
        model=transformers.BertForTokenClassification(config),
        args=arguments(folder, eval_strategy="epoch", lr_scheduler_type="polynomial"),
        train_dataset=data.tagged(64),
        eval_dataset=data.tagged(16),
        compute_metrics=accuracy,
        **xla,
    )


def question_answering(folder: str, **xla: Any) -> Trainer:
    return Trainer(
        model=transformers.DistilBertForQuestionAnswering(transformers.DistilBertConfig(**_DISTILBERT)),
        args=arguments(folder, warmup_steps=3),
        train_dataset=data.answered(64),
        **xla,
    )


def masked_language(folder: str, **xla: Any) -> Trainer:
    return Trainer(
        model=transformers.RobertaForMaskedLM(transformers.RobertaConfig(**_CONFIG)),
        args=arguments(folder, lr_scheduler_type="cosine", eval_strategy="epoch"),
        train_dataset=data.language(64),
        eval_dataset=data.language(16, skip=64),
        data_collator=DataCollatorForLanguageModeling(tokenizer(), mlm_probability=0.15),
        **xla,
    )


def multiple_choice(folder: str, **xla: Any) -> Trainer:
    return Trainer(
        model=transformers.BertForMultipleChoice(transformers.BertConfig(**_CONFIG)),
        args=arguments(folder, eval_strategy="epoch"),
        train_dataset=data.chosen(64),
        eval_dataset=data.chosen(16),
        compute_metrics=accuracy,
        **xla,
    )
