"""Both trainers go on from a checkpoint bit for bit: after a save at any moment, after a kill, and with any data."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from tests.device import ON_TORCH_TPU
from tests.hf_trainer.scenarios import Classifier, gpt2, token_samples, vector_samples
from tests.isolation import isolated, outcome_of, run_in_child
from tests.trainers import ON_SCHEDULE, Noisy, Training, checkpoint, contents, each_trainer, saved_steps, train
from xla_adapters.checkpoint import CheckpointConfig

pytestmark = pytest.mark.isolated

SCHEDULE: dict[str, dict[str, Any]] = {
    "hf": {"stock": {"lr_scheduler_type": "cosine", "warmup_steps": 2}},
    "lightning": {},
}


def assert_goes_on(rest: Training, whole: Training, done: int) -> None:
    """From the step `done` to the end, with the weights of the whole run."""
    assert len(rest.losses) == len(whole.losses) - done > 0
    assert rest.losses == whole.losses[done:]
    expected = whole.weights()
    assert all(torch.equal(value, expected[name]) for name, value in rest.weights().items())


@pytest.mark.parametrize(
    ("kind", "optimizer"),
    [
        *((kind, name) for kind in ("hf", "lightning") for name in ("adamw", "sgd momentum", "rmsprop")),
        ("hf", "adafactor"),
    ],
)
@pytest.mark.parametrize("saved_at", [3, 4])
def test_resume_is_exact(kind: str, optimizer: str, saved_at: int, tmp_path: Path) -> None:
    """Under dropout, from step 3, in the middle of an epoch of 4 steps, and from step 4, at its end."""
    options: dict[str, Any] = {"steps": 7, "dropout": 0.4, "data": vector_samples(16), "optimizer": optimizer}
    whole = train(kind, tmp_path, save_every=saved_at, **options, **SCHEDULE[kind])
    path = checkpoint(kind, tmp_path, saved_at)
    resumed = train(kind, tmp_path / "rest", resume=path, seed=1, **options, **SCHEDULE[kind])
    assert_goes_on(resumed, whole, saved_at)
    assert [step.executions for step in resumed.counted] == [1] * (7 - saved_at)
    # No new compile: the graph is that of the uninterrupted run.
    assert resumed.counts.compiles == 0, resumed.program.events


@each_trainer
@pytest.mark.parametrize("accumulation", ["per_micro_batch", "unrolled"])
def test_resume_under_accumulation(kind: str, accumulation: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"steps": 4, "dropout": 0.4, "accumulate": 2, "accumulation": accumulation}
    whole = train(kind, tmp_path, save_every=2, **options)
    resumed = train(kind, tmp_path / "rest", resume=checkpoint(kind, tmp_path, 2), seed=1, **options)
    assert_goes_on(resumed, whole, len(whole.losses) // 2)
    assert resumed.counts.compiles == 0, resumed.program.events


@each_trainer
def test_resume_from_what_is_saved_on_a_schedule_under_accumulation(kind: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"dropout": 0.4, "accumulate": 2}
    if kind == "hf":
        options["stock"] = {"lr_scheduler_type": "constant"}
    whole = train(kind, steps=6, **options)
    config = CheckpointConfig(every_n_steps=2)
    train(kind, tmp_path, steps=2, checkpoint=config, **options)
    path = checkpoint(kind, tmp_path, 2) if kind == "hf" else tmp_path / ON_SCHEDULE
    assert_goes_on(train(kind, steps=6, resume=path, **{**options, "seed": 1}), whole, len(whole.losses) // 3)


@each_trainer
def test_what_is_saved_of_a_replayed_run_is_what_the_traced_one_saves(kind: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"steps": 9, "dropout": 0.3, "data": vector_samples(32), "save_every": 6}
    traced, replayed = (train(kind, tmp_path / str(mode), step_replay=mode, **options) for mode in (False, "auto"))
    assert replayed.program.replays > 0
    assert replayed.losses == traced.losses
    paths = [checkpoint(kind, tmp_path / str(mode), 6) for mode in (False, "auto")]
    saved = [contents(path) for path in paths]
    for name, value in saved[0].items():
        assert value == saved[1][name], name
    assert saved[0].keys() == saved[1].keys()
    assert_goes_on(train(kind, tmp_path / "rest", resume=paths[1], **{**options, "seed": 1}), traced, 6)


def _run(kind: str, folder: Path, *, killed_at: int | None = None, resume: Any = None) -> Any:
    def kill(moment: Any) -> None:
        if moment.step == killed_at:
            os.kill(os.getpid(), signal.SIGKILL)

    options: dict[str, Any] = {"at": {} if killed_at is None else {"step begin": kill}}
    seed = 0 if resume is None else 1
    if kind == "hf":
        # With dropout activation checkpointing is refused on TorchTPU.
        options |= {"net": gpt2(dropout=0.3, seed=seed), "data": token_samples(24)}
        options["stock"] = {"gradient_checkpointing": not ON_TORCH_TPU}
    run = train(kind, folder, steps=12, dropout=0.3, save_every=4, resume=resume, seed=seed, **options)
    return run.losses, {name: value.tolist() for name, value in run.weights().items()}, run.counts.compiles


@each_trainer
def test_a_run_that_was_killed_goes_on_in_a_new_process_and_compiles_once(kind: str, tmp_path: Path) -> None:
    whole = run_in_child(lambda: _run(kind, tmp_path / "whole"))
    killed = outcome_of(lambda: _run(kind, tmp_path / "cut", killed_at=7))
    assert killed.error == "the process died with signal 9", killed.error
    assert saved_steps(tmp_path / "cut") == [4]
    rest = run_in_child(lambda: _run(kind, tmp_path / "cut", resume=checkpoint(kind, tmp_path / "cut", 4)))
    assert rest == (whole[0][4:], whole[1], 1)


# ---- data --------------------------------------------------------------------------------------------

ROWS = 24


class _Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        info, data = torch.utils.data.get_worker_info(), Noisy()
        for index in range(0 if info is None else info.id, ROWS, 1 if info is None else info.num_workers):
            yield data[index]


def _huggingface(streaming: bool) -> Any:
    import datasets

    rows = [{"x": [float((row * 7 + i) % 5) for i in range(4)], "labels": row % 3} for row in range(ROWS)]
    data = datasets.Dataset.from_list(rows)
    return data.to_iterable_dataset(num_shards=3).shuffle(seed=3, buffer_size=8) if streaming else data


def collating(samples: list[Any]) -> dict[str, torch.Tensor]:
    """Draws random numbers, like a collator that masks tokens."""
    xs = torch.tensor([list(map(float, sample["x"])) for sample in samples])
    return {"x": xs * (torch.rand(xs.shape) < 0.8), "labels": torch.tensor([sample["labels"] for sample in samples])}


class _Pairs(Classifier):
    """Takes batches of two loaders."""

    def forward(self, **batches: Any) -> dict[str, torch.Tensor]:  # type: ignore[override]
        if "x" in batches:
            return super().forward(**batches)
        losses = [super(_Pairs, self).forward(**batch)["loss"] for batch in batches.values()]
        return {"loss": torch.stack(losses).sum()}


def _several() -> Any:
    samples = vector_samples(ROWS)
    return {"a": DataLoader(samples, 4, shuffle=True), "b": DataLoader(samples[:8], 4, shuffle=True)}  # type: ignore[arg-type]


_Options = dict[str, Any]
# The data, and options of transformers and of Lightning's loader; None where it is nothing of its own there.
DATA: dict[str, tuple[Callable[[], Any], _Options | None, _Options | None]] = {
    "plain": (lambda: vector_samples(ROWS), {}, {"shuffle": True}),
    "drawing": (Noisy, {}, {"shuffle": True}),
    "workers": (Noisy, {"dataloader_num_workers": 2}, {"shuffle": True, "num_workers": 2}),
    "lasting workers": (
        Noisy,
        {"dataloader_num_workers": 2, "dataloader_persistent_workers": True},
        {"shuffle": True, "num_workers": 2, "persistent_workers": True},
    ),
    "stream": (_Stream, {}, {}),
    "stream of workers": (_Stream, {"dataloader_num_workers": 2}, {"num_workers": 2}),
    "datasets": (lambda: _huggingface(False), {}, {"collate_fn": collating}),
    "streaming datasets": (lambda: _huggingface(True), {}, {"collate_fn": collating}),
    "accumulated": (Noisy, {"gradient_accumulation_steps": 2}, None),
    "collator": (lambda: vector_samples(ROWS), {}, None),
    "sampler of torch": (Noisy, {"accelerator_config": {"use_seedable_sampler": False}}, None),
    "generator": (Noisy, None, {"shuffle": True, "num_workers": 2, "generator": 3}),
    "several": (lambda: _several, None, {}),
}


def _draws(moment: Any) -> None:
    """As a trainer that draws from the host's generators while it trains."""
    scale = 1 + 0.1 * random.random() + 0.1 * float(torch.rand(()))
    for group in moment.optimizer.param_groups:
        group["weight_decay"] = 0.01 * scale


def _cases() -> Iterator[Any]:
    for data, (_, of_transformers, of_loader) in DATA.items():
        for kind, options in (("hf", of_transformers), ("lightning", of_loader)):
            if options is not None:
                yield pytest.param(kind, data, marks=[pytest.mark.slow] if "workers" in data else [])


# torch waits five seconds for each worker that is alive when its loader is deleted.
@isolated(timeout=400)
@pytest.mark.parametrize(("kind", "data"), _cases())
def test_the_data_goes_on(kind: str, data: str, tmp_path: Path) -> None:
    """Resumes inside the first epoch of six steps (three with accumulation) and in the second; some at its end, too."""
    make, of_transformers, of_loader = DATA[data]

    def run(step: int | None = None) -> Training:
        options: dict[str, Any] = {"stock": of_transformers} if kind == "hf" else {"own": dict(of_loader or {})}
        if data == "collator":
            options["own"] = {"data_collator": collating}
        if data == "generator":
            options["own"]["generator"] = torch.Generator().manual_seed(3)
        return train(
            kind,
            tmp_path if step is None else tmp_path / "rest",
            resume=None if step is None else checkpoint(kind, tmp_path, step),
            net=(_Pairs if data == "several" else Classifier)(dropout=0.4, seed=0 if step is None else 1),
            data=make(),
            steps=10,
            save_every=2,
            at={"step end": _draws},
            **options,
        )

    whole = run()
    assert len(whole.losses) == 10
    for step in (2, 6, 8) if data in ("plain", "stream") else (2, 8):
        # Random numbers drawn earlier in this process must not matter.
        torch.manual_seed(step)
        random.seed(step)
        assert run(step).losses == whole.losses[step:], step


@isolated(timeout=400)
@pytest.mark.parametrize("data", ["drawing", "stream", "accumulated"])
@pytest.mark.parametrize("kind", ["hf", "lightning"])
def test_a_batch_that_was_read_and_not_trained_is_one_of_the_rest(kind: str, data: str, tmp_path: Path) -> None:
    """Saves as a step begins: by hand, or because of an exception in it."""
    make, of_transformers, of_loader = DATA[data]
    if kind == "lightning" and of_loader is None:
        of_loader = {"shuffle": True}
    per_epoch = 3 if data == "accumulated" else 6
    # Lightning's has a loss for each micro batch.
    losses = 2 if data == "accumulated" and kind == "lightning" else 1

    def run(saved_at: int = 0, resume: Path | None = None) -> Training:
        def save(moment: Any) -> None:
            if moment.step == saved_at and not (tmp_path / f"checkpoint-{saved_at - 1}").exists():
                if kind == "hf":
                    moment.trainer._save_checkpoint(moment.trainer.model, None)
                else:
                    moment.trainer.save_checkpoint(tmp_path / f"checkpoint-{saved_at - 1}")

        options: dict[str, Any] = {"stock": of_transformers} if kind == "hf" else {"own": dict(of_loader or {})}
        if kind == "lightning" and data == "accumulated":
            options["stock"] = {"accumulate_grad_batches": 2}
        return train(
            kind,
            tmp_path if resume is None else tmp_path / "rest",
            resume=resume,
            net=Classifier(dropout=0.4, seed=0 if resume is None else 1),
            data=make(),
            steps=10,
            at={"step begin": save, "step end": _draws},
            **options,
        )

    whole = run()
    for step in (3, per_epoch, per_epoch + 2):
        saving = run(saved_at=step)
        assert saving.losses == whole.losses
        torch.manual_seed(step)
        random.seed(step)
        rest = run(resume=tmp_path / f"checkpoint-{step - 1}")
        assert rest.losses == whole.losses[losses * (step - 1) :], step
