"""The trainers of sentence-transformers, with an encoder."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from datasets import Dataset
from sentence_transformers import (
    CrossEncoder,
    CrossEncoderTrainer,
    CrossEncoderTrainingArguments,
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.cross_encoder.losses import BinaryCrossEntropyLoss
from sentence_transformers.sentence_transformer.losses import CoSENTLoss, MultipleNegativesRankingLoss
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from transformers import BertForSequenceClassification

from benchmarks.ecosystem.cell import STEPS, Cell, Trained
from benchmarks.ecosystem.with_transformers import on_xla, train_with
from tests.hf_trainer import text_models as text
from xla_adapters.config import OnGraphBreak


def _answered(index: int) -> dict[str, Any]:
    return {"anchor": f"q{index:02}", "positive": f"answer {index:02}"}


def _scored(index: int) -> dict[str, Any]:
    return {"first": f"q{index:02}", "second": f"answer {index * 3 % 50:02}", "score": index % 5 / 5}


def _labelled(index: int) -> dict[str, Any]:
    return {"first": f"q{index:02}", "second": f"answer {index:02}", "label": float(index % 2)}


def _sentences() -> Any:
    transformer = Transformer(text.bert_folder(), max_seq_length=16)
    return SentenceTransformer(modules=[transformer, Pooling(16)], device="cpu")


def _pairs() -> Any:
    return CrossEncoder(text.bert_folder(BertForSequenceClassification, num_labels=1), num_labels=1, device="cpu")


def _train(
    stock: type,
    config: type,
    model: Callable[[], Any],
    loss: Callable[[Any], Any],
    row: Callable[[int], dict[str, Any]],
    on_graph_break: OnGraphBreak | None,
) -> Trained:
    def options() -> dict[str, Any]:
        net = model()
        rows = Dataset.from_list([row(index) for index in range(4 * STEPS)])
        return {"model": net, "loss": loss(net), "train_dataset": rows}

    return train_with(stock, on_xla(stock), config, options, on_graph_break)


def cells() -> list[Cell]:
    """Bi-encoders with two losses, and a cross-encoder."""
    by_sentences = functools.partial(
        _train, SentenceTransformerTrainer, SentenceTransformerTrainingArguments, _sentences
    )
    by_pairs = functools.partial(_train, CrossEncoderTrainer, CrossEncoderTrainingArguments, _pairs)
    name = "sentence-transformers"
    return [
        Cell(name, "encoder, ranking loss", functools.partial(by_sentences, MultipleNegativesRankingLoss, _answered)),
        Cell(name, "encoder, CoSENT loss", functools.partial(by_sentences, CoSENTLoss, _scored)),
        Cell(name, "cross-encoder", functools.partial(by_pairs, BinaryCrossEntropyLoss, _labelled)),
    ]
