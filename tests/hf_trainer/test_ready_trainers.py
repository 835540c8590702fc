"""The ready trainers of TRL and sentence-transformers are the subclasses that one would write by hand."""

from __future__ import annotations

import functools
import importlib
import inspect
import pickle
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
from transformers import BertForMaskedLM, BertForSequenceClassification, LlamaForSequenceClassification

from hf_trainer import XLATrainerMixin
from tests.hf_trainer.scenarios import steps_of, train
from tests.hf_trainer.text_models import bert_folder, llama, tokenizer
from tests.hf_trainer.trl_runs import arguments_of, completion, judged, pair, preference, rows_of, text
from tests.isolation import isolated, run_in_child
from xla_adapters import get_runtime

trl = pytest.importorskip("trl")
sentence_transformers = pytest.importorskip("sentence_transformers")
_BY_TRL = {
    "SFTTrainer": (trl.SFTConfig, text),
    "DPOTrainer": (trl.DPOConfig, preference),
    "RewardTrainer": (trl.RewardConfig, pair),
    "KTOTrainer": (trl.KTOConfig, judged),
    "GRPOTrainer": (trl.GRPOConfig, completion),
}
_SENTENCES = ("SentenceTransformerTrainer", "CrossEncoderTrainer", "SparseEncoderTrainer")
_ALL = [("trl", name) for name in _BY_TRL] + [("sentence_transformers", name) for name in _SENTENCES]
_each = pytest.mark.parametrize(("library", "name"), _ALL, ids=[name for _, name in _ALL])
# Those of which both trainings take some seconds.
_QUICK = ("SFTTrainer", "SentenceTransformerTrainer", "SparseEncoderTrainer")
_STEPS = 6
# Why steps are traced each time.
_TRACED = {
    "CrossEncoderTrainer": "neither its batch nor part of a module or optimizer",
    "SparseEncoderTrainer": "SpladeLoss may return parts of the loss",
}


def _ready(library: str, name: str) -> Any:
    return getattr(importlib.import_module(f"hf_trainer.{library}"), name)


def _by_hand(library: str, name: str) -> Any:
    return type(name, (XLATrainerMixin, getattr(importlib.import_module(library), name)), {"__module__": __name__})


def _length(completions: list[str], **_: Any) -> list[float]:
    return [float(len(one)) for one in completions]


def _of_trl(kind: Any) -> Any:
    config, make = _BY_TRL[kind.__name__]
    more: dict[str, Any] = {}
    args: dict[str, Any] = {"max_steps": _STEPS}
    if kind.__name__ == "GRPOTrainer":
        args.update(max_completion_length=4, num_generations=4)
        more["reward_funcs"] = _length
    rewards = kind.__name__ == "RewardTrainer"
    model = llama(LlamaForSequenceClassification, num_labels=1) if rewards else llama()
    return kind(
        model=model,
        args=arguments_of(config, **args),
        train_dataset=rows_of(make),
        processing_class=tokenizer(),
        **more,
    )


def _of_sentence_transformers(kind: Any) -> Any:
    name = kind.__name__.removesuffix("Trainer")
    library = importlib.import_module(f"sentence_transformers.{kind.__mro__[2].__module__.split('.')[1]}")
    losses = importlib.import_module(f"{library.__name__}.losses")
    if name == "CrossEncoder":
        model = library.CrossEncoder(bert_folder(BertForSequenceClassification, num_labels=1), device="cpu")
        loss = losses.BinaryCrossEntropyLoss(model)
    elif name == "SparseEncoder":
        model = library.SparseEncoder(bert_folder(BertForMaskedLM), device="cpu")
        loss = losses.SpladeLoss(
            model,
            losses.SparseMultipleNegativesRankingLoss(model),
            document_regularizer_weight=1e-3,
            query_regularizer_weight=1e-3,
        )
    else:
        model = library.SentenceTransformer(bert_folder(), device="cpu")
        loss = losses.MultipleNegativesRankingLoss(model)
    label = {"label": 1.0} if name == "CrossEncoder" else {}
    rows = [{"anchor": f"q{index:02}", "positive": f"answer {index:02}", **label} for index in range(4 * _STEPS)]
    arguments = getattr(sentence_transformers, f"{name}TrainingArguments")
    return kind(
        model=model,
        args=arguments_of(arguments, max_steps=_STEPS, output_dir=tempfile.mkdtemp()),
        train_dataset=rows_of(rows.__getitem__, len(rows)),
        loss=loss,
    )


def _trained(make: Callable[[], Any], library: str) -> dict[str, Any]:
    get_runtime().device.initialize()
    trainer = (_of_trl if library == "trl" else _of_sentence_transformers)(make())
    run = train(trainer)
    program = steps_of(trainer).train
    return {
        "compiles": [step.compiles for step in run.steps],
        "executions": [step.executions for step in run.steps],
        "replays": program.replays,
        "reasons": list(program.replay_reasons),
        "losses": run.losses,
    }


@pytest.mark.parametrize(
    ("library", "name"),
    [pytest.param(library, name, id=name, marks=() if name in _QUICK else pytest.mark.slow) for library, name in _ALL],
)
def test_it_trains_as_a_subclass_by_hand(library: str, name: str) -> None:
    ready, by_hand = (
        run_in_child(functools.partial(_trained, functools.partial(make, library, name), library))
        for make in (_ready, _by_hand)
    )
    assert ready == by_hand
    if (reason := _TRACED.get(name)) is None:
        assert ready["replays"] >= 2, ready["reasons"]
    else:
        assert reason in ready["reasons"][0]
    if name != "GRPOTrainer":
        # That of GRPO is about 0 by its nature, and its steps generate.
        assert len(set(ready["losses"])) > 1
        assert ready["executions"] == [1] * _STEPS


@_each
def test_the_class_is_one_of_the_module(library: str, name: str) -> None:
    ready = _ready(library, name)
    stock = getattr(importlib.import_module(library), name)
    assert issubclass(ready, stock)
    assert ready.__mro__[1:3] == (XLATrainerMixin, stock)
    assert (ready.__module__, ready.__qualname__) == (f"hf_trainer.{library}", name)
    assert pickle.loads(pickle.dumps(ready)) is ready
    assert f"{library}.{name}" in str(inspect.getdoc(ready))
    options = inspect.signature(ready).parameters
    assert {"auto_sharding", "sharding", "checkpoint", "shapes", "xla_args"} <= set(options)


@isolated
def test_a_reference_model_may_be_given_by_position() -> None:
    args = arguments_of(trl.DPOConfig, max_steps=1)
    dpo = _ready("trl", "DPOTrainer")(llama(), llama(), args, None, rows_of(preference), processing_class=tokenizer())
    assert train(dpo).steps[0].executions == 1
    with pytest.raises(ValueError, match="fp16=True"):
        _ready("trl", "DPOTrainer")(llama(), llama(), arguments_of(trl.DPOConfig, fp16=True), None, rows_of(preference))
