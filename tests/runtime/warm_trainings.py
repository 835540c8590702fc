"""Trainings of which a second process is to compile nothing; for tests and for `python -m benchmarks.warm_start`."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Seq2SeqTrainingArguments, TrainerCallback

import xla_adapters
from hf_trainer import Seq2SeqTrainer, Trainer, XLATrainerMixin
from lightning_strategy import XLAEagerStrategy
from tests.device import DEVICE, ON_TORCH_TPU
from xla_adapters import get_runtime

_WORDS, _LENGTH, _ROWS = 256, 32, 8


@dataclass(kw_only=True)
class Outcome:
    """What a process did.

    Attributes:
        losses: of its steps, and what else it computed.
        compiles: programs that were compiled, those of eager operations, too.
        loads: programs that were loaded.
        first_step: seconds from the making of the model to the end of the first step.
    """

    losses: list[float]
    compiles: int = 0
    loads: int = 0
    first_step: float = 0.0


@dataclass
class Clock:
    """Notes when the first step has ended, its work on the device, too."""

    began: float = field(default_factory=time.perf_counter)
    first: float | None = None

    def step_ended(self) -> None:
        if self.first is None:
            get_runtime().device.wait()
            self.first = time.perf_counter() - self.began


def model(layers: int, width: int) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=layers,
        n_head=2,
        n_embd=width,
        vocab_size=_WORDS,
        n_positions=_LENGTH,
        eos_token_id=0,
        bos_token_id=0,
        pad_token_id=1,
    )
    # The stand-in for a TPU has no attention kernel.
    config._attn_implementation = "eager" if ON_TORCH_TPU else "sdpa"
    return GPT2LMHeadModel(config)


def rows(count: int = 48) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        {"input_ids": row, "labels": row} for row in torch.randint(0, _WORDS, (count, _LENGTH), generator=generator)
    ]


class _Notes(TrainerCallback):
    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.clock.step_ended()


def _trained(trainer: Any, **options: Any) -> list[float]:
    trainer.train(**options)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def arguments(folder: str, kind: type = Seq2SeqTrainingArguments, **options: Any) -> Any:
    given = {
        "max_steps": 6,
        "per_device_train_batch_size": _ROWS,
        "per_device_eval_batch_size": _ROWS,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    return kind(folder, **{**given, **options})


def hf(layers: int, width: int, **options: Any) -> Callable[[Clock], list[float]]:
    """transformers' Trainer."""

    def run(clock: Clock) -> list[float]:
        with tempfile.TemporaryDirectory() as folder:
            trainer = Trainer(
                model(layers, width), arguments(folder), train_dataset=rows(), callbacks=[_Notes(clock)], **options
            )
            return _trained(trainer)

    return run


def hf_evaluation(layers: int, width: int) -> Callable[[Clock], list[float]]:
    """Evaluation and prediction, with a last batch that is smaller."""

    def run(clock: Clock) -> list[float]:
        with tempfile.TemporaryDirectory() as folder:
            trainer = Trainer(model(layers, width), arguments(folder), train_dataset=rows(), callbacks=[_Notes(clock)])
            losses = _trained(trainer)
            evaluated = trainer.evaluate(rows(20))["eval_loss"]
            predicted = trainer.predict(rows(20)).predictions
            return [*losses, evaluated, float(predicted.sum())]

    return run


def hf_generation(layers: int, width: int) -> Callable[[Clock], list[float]]:
    """An evaluation that generates."""

    def run(clock: Clock) -> list[float]:
        with tempfile.TemporaryDirectory() as folder:
            options = {"predict_with_generate": True, "generation_max_length": 20}
            trainer = Seq2SeqTrainer(
                model(layers, width), arguments(folder, **options), train_dataset=rows(), callbacks=[_Notes(clock)]
            )
            losses = _trained(trainer)
            trainer.model.generation_config.pad_token_id = 1
            prompts = [{name: value[:8] for name, value in row.items()} for row in rows(8)]
            tokens = trainer.predict(prompts).predictions
            return [*losses, *tokens.flatten().tolist()]

    return run


def sft(layers: int, width: int) -> Callable[[Clock], list[float]]:
    """TRL's SFTTrainer."""

    def run(clock: Clock) -> list[float]:
        from datasets import Dataset
        from trl import SFTConfig, SFTTrainer

        from tests.hf_trainer.text_models import tokenizer

        ours = type("Ours", (XLATrainerMixin, SFTTrainer), {})
        data = Dataset.from_list([{"input_ids": row["input_ids"].tolist()} for row in rows()])
        with tempfile.TemporaryDirectory() as folder:
            given = arguments(folder, SFTConfig, max_length=_LENGTH, bf16=False)
            trainer = ours(
                model(layers, width),
                given,
                train_dataset=data,
                processing_class=tokenizer(),
                callbacks=[_Notes(clock)],
            )
            return _trained(trainer)

    return run


class _Module(L.LightningModule):
    def __init__(self, layers: int, width: int, clock: Clock) -> None:
        super().__init__()
        self.model, self.clock, self.losses = model(layers, width), clock, []  # type: ignore[var-annotated]

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        loss: torch.Tensor = self.model(**batch).loss
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, outputs: Any, *args: Any) -> None:
        self.clock.step_ended()
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def lightning(layers: int, width: int, **options: Any) -> Callable[[Clock], list[float]]:
    """Lightning's Trainer."""

    def run(clock: Clock) -> list[float]:
        module = _Module(layers, width, clock)
        quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        trainer = L.Trainer(strategy=XLAEagerStrategy(**options), max_steps=6, enable_model_summary=False, **quiet)
        trainer.fit(module, torch.utils.data.DataLoader(rows(), batch_size=_ROWS))  # type: ignore[arg-type]
        return module.losses

    return run


def own_loop(layers: int, width: int) -> Callable[[Clock], list[float]]:
    """A `CompiledStep`."""

    def run(clock: Clock) -> list[float]:
        net = model(layers, width).to(DEVICE)
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)

        @xla_adapters.CompiledStep
        def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
            loss: torch.Tensor = net(**batch).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            return loss

        losses = []
        for batch in torch.utils.data.DataLoader(rows(), batch_size=_ROWS):  # type: ignore[arg-type]
            losses.append(step(batch).item())
            clock.step_ended()
        return losses

    return run


TRAININGS: dict[str, Callable[..., Callable[[Clock], list[float]]]] = {
    "HF Trainer": hf,
    "HF evaluation": hf_evaluation,
    "HF generation": hf_generation,
    "TRL SFT": sft,
    "Lightning": lightning,
    "CompiledStep": own_loop,
}
SHARDED: dict[str, Callable[..., Callable[[Clock], list[float]]]] = {
    "HF Trainer, fsdp": partial(hf, sharding="fsdp"),
    "HF Trainer, auto": partial(hf, auto_sharding=True),
    "Lightning, fsdp": partial(lightning, sharding="fsdp"),
}
# XLA:CPU, which stands in for a TPU there, does not compile this GPT-2 in transformers' Trainer.
ON_THIS_RUNTIME = ["Lightning", "CompiledStep"] if ON_TORCH_TPU else list(TRAININGS)


def train(name: str, layers: int, width: int, folder: Path) -> Outcome:
    """Runs in a process of its own, with the compile cache in this folder."""
    sharded = name in SHARDED
    if sharded:
        os.environ["CPU_NUM_DEVICES"] = "8"
    xla_adapters.initialize(cache_dir=str(folder), spmd=sharded)
    clock = Clock()
    losses = {**TRAININGS, **SHARDED}[name](layers, width)(clock)
    metrics = get_runtime().counters.metrics()
    return Outcome(
        losses=losses,
        compiles=metrics.compiles + metrics.eager_compiles,
        loads=metrics.loads,
        first_step=clock.first or 0.0,
    )


def killed(layers: int, width: int, folder: Path, output: str) -> None:
    """Saves after step 3, and is killed in step 5."""

    class Kills(TrainerCallback):
        def on_step_end(self, given: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 5:
                os.kill(os.getpid(), signal.SIGKILL)

    xla_adapters.initialize(cache_dir=str(folder))
    options = arguments(output, save_strategy="steps", save_steps=3)
    Trainer(model(layers, width), options, train_dataset=rows(), callbacks=[Kills()]).train()


def resumed(layers: int, width: int, folder: Path, output: str) -> Outcome:
    """Goes on where `killed` was killed."""
    xla_adapters.initialize(cache_dir=str(folder))
    trainer = Trainer(
        model(layers, width), arguments(output, save_strategy="steps", save_steps=3), train_dataset=rows()
    )
    losses = _trained(trainer, resume_from_checkpoint=True)
    metrics = get_runtime().counters.metrics()
    return Outcome(losses=losses, compiles=metrics.compiles + metrics.eager_compiles, loads=metrics.loads)
