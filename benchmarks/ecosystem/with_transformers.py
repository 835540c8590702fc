"""transformers' Trainer and Seq2SeqTrainer, and both with adapters of PEFT."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import transformers
from peft import LoraConfig, get_peft_model
from torch import nn

import hf_trainer
from benchmarks import zoo
from benchmarks.ecosystem.cell import (
    ARCHITECTURE_LIMIT,
    BF16_LIMIT,
    EPSILON,
    LEARNING_RATE,
    NO_LIMIT,
    STEPS,
    Cell,
    Trained,
    weights_of,
)
from benchmarks.step_counts import CountedSteps
from benchmarks.training import Batches, only_item
from benchmarks.zoo import Model
from hf_trainer.generation import GENERATION
from tests.plain_cpu import without_xla
from xla_adapters import count, get_runtime
from xla_adapters.config import OnGraphBreak


def cells(
    stock: type, ours: type, config: type, trainer: str, models: tuple[Model, ...], **arguments: Any
) -> list[Cell]:
    """Cells of one of transformers' trainers.

    Args:
        stock: transformers' own.
        ours: the one on XLA.
        config: of the arguments.
        trainer: its name.
        models: trained by it.
        arguments: for `config`.
    """

    def train(model: Model, on_graph_break: OnGraphBreak | None) -> Trained:
        return train_with(
            stock,
            ours,
            config,
            lambda: {
                "model": model.seeded(),
                "train_dataset": Batches(model.batches(STEPS)),
                "data_collator": only_item,
            },
            on_graph_break,
            per_device_train_batch_size=1,
            remove_unused_columns=False,
            **arguments,
        )

    return [Cell(trainer, model.name, functools.partial(train, model), model.prepare) for model in models]


def plain(models: tuple[Model, ...], **arguments: Any) -> list[Cell]:
    """Cells of the Trainer, with these training arguments."""
    config = transformers.TrainingArguments
    return cells(transformers.Trainer, hf_trainer.Trainer, config, "HF Trainer", models, **arguments)


def architectures(*, bf16: bool) -> list[Cell]:
    """Cells of the Trainer with every architecture of the zoo, of which only the losses are compared."""
    limit = BF16_LIMIT if bf16 else ARCHITECTURE_LIMIT
    return [replace(cell, loss_limit=limit, weight_limit=NO_LIMIT) for cell in plain(zoo.ARCHITECTURES, bf16=bf16)]


def seq2seq(models: tuple[Model, ...]) -> list[Cell]:
    """Cells of the Seq2SeqTrainer."""
    return cells(
        transformers.Seq2SeqTrainer,
        hf_trainer.Seq2SeqTrainer,
        transformers.Seq2SeqTrainingArguments,
        "Seq2SeqTrainer",
        models,
    )


def adapted(models: tuple[Model, ...], *, dora: bool) -> list[Cell]:
    """Cells of the Trainer with models whose linear layers have adapters of PEFT: DoRA or LoRA."""

    def build(model: Model) -> nn.Module:
        config = LoraConfig(r=2, target_modules="all-linear", lora_dropout=0.0, use_dora=dora)
        return get_peft_model(model.build(), config)

    name = "PEFT DoRA" if dora else "PEFT LoRA"
    changed = tuple(Model(model.name, functools.partial(build, model), model.batch, model.prepare) for model in models)
    return cells(transformers.Trainer, hf_trainer.Trainer, transformers.TrainingArguments, name, changed)


def on_xla(stock: type) -> type:
    """Our class of a trainer that is derived from transformers'."""
    return type(f"XLA{stock.__name__}", (hf_trainer.XLATrainerMixin, stock), {})


def train_with(
    stock: type,
    ours: type,
    config: type,
    options: Callable[[], dict[str, Any]],
    on_graph_break: OnGraphBreak | None,
    **arguments: Any,
) -> Trained:
    """Trains by a trainer derived from transformers'.

    Args:
        stock: for the CPU.
        ours: for XLA.
        config: of the arguments.
        options: makes those of the trainer.
        on_graph_break: None for the CPU.
        arguments: for `config`.
    """
    values = {
        "max_steps": STEPS,
        "per_device_train_batch_size": 4,
        "learning_rate": LEARNING_RATE,
        "adam_epsilon": EPSILON,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        **arguments,
    }
    with tempfile.TemporaryDirectory() as folder:
        if on_graph_break is None:
            with without_xla():
                trainer = stock(args=config(folder, use_cpu=True, **values), **options())
                trainer.train()
            return Trained(losses=_losses(trainer), weights=weights_of(trainer.model))
        # The first access to `replay_works` executes two tiny graphs, which must not be counted.
        _ = get_runtime().replay_works
        counted = CountedSteps()
        trainer = ours(args=config(folder, **values), callbacks=[counted], on_graph_break=on_graph_break, **options())
        generation = trainer._xla.steps.evaluation[GENERATION]
        tokens = [0]
        trainer.add_callback(AtStepEnd(lambda: tokens.append(generation.calls)))
        with count() as counters:
            trainer.train()
    program = trainer._xla.steps.train
    return Trained(
        losses=_losses(trainer),
        weights=weights_of(trainer.model),
        compiles=counters.compiles,
        # A trainer that generates executes a graph for each token.
        executions=[
            int(step["executions"]) - after + before
            for step, (before, after) in zip(counted.steps, pairwise(tokens), strict=True)
        ],
        calls=program.calls,
        replays=program.replays,
        reasons=program.replay_reasons,
    )


class AtStepEnd(transformers.TrainerCallback):  # type: ignore[misc]
    """Calls a function when a step has ended."""

    def __init__(self, function: Callable[[], None]) -> None:
        self._function = function

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self._function()


def _losses(trainer: transformers.Trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
