"""Runs are bit-identical: twice in one process, in a new one, and resumed from a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.device import ON_TORCH_TPU
from tests.hf_trainer.scenarios import Classifier, arguments, gpt2, ours, steps_of, token_samples, vector_samples
from tests.isolation import isolated, run_in_child


def _losses_and_parameters(model: Any, data: Any, **options: Any) -> tuple[list[float], dict[str, list[float]]]:
    run = ours(model, data, args=arguments(**options))
    return run.losses, {name: value.flatten().tolist() for name, value in run.parameters().items()}


def _twice() -> list[Any]:
    return [_losses_and_parameters(gpt2(dropout=0.3), token_samples(16)) for _ in range(2)]


def _with_another_seed() -> Any:
    return _losses_and_parameters(gpt2(dropout=0.3), token_samples(16), seed=43, data_seed=42)


def test_same_seed_same_run() -> None:
    """Under dropout: twice in one process, and once in a new one."""
    first, second = run_in_child(_twice)
    third, _ = run_in_child(_twice)
    assert first == second
    assert first == third
    other = run_in_child(_with_another_seed)
    assert other[0] != first[0]


_OPTIMIZERS = {
    "adamw": {"optim": "adamw_torch"},
    "sgd": {"optim": "sgd", "optim_args": "momentum=0.9"},
    "adafactor": {"optim": "adafactor"},
    "rmsprop": {"optim": "rmsprop", "optim_args": "momentum=0.9"},
}


@isolated
@pytest.mark.parametrize("name", sorted(_OPTIMIZERS))
@pytest.mark.parametrize("saved_at", [3, 4])
def test_resume_is_exact(name: str, saved_at: int, tmp_path: Path) -> None:
    """Under dropout, from step 3, in the middle of an epoch of 4 steps, and from step 4, at its end."""
    args: dict[str, Any] = {
        **_OPTIMIZERS[name],
        "max_steps": 7,
        "save_strategy": "steps",
        "save_steps": saved_at,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 2,
    }
    data = vector_samples(16)
    whole = ours(Classifier(dropout=0.4), data, args=arguments(str(tmp_path), **args))
    checkpoint = str(tmp_path / f"checkpoint-{saved_at}")
    resumed = ours(
        Classifier(dropout=0.4, seed=1),
        data,
        args=arguments(**args),
        train_options={"resume_from_checkpoint": checkpoint},
    )
    assert resumed.losses == whole.losses
    expected = whole.parameters()
    assert all(torch.equal(value, expected[key]) for key, value in resumed.parameters().items())
    assert [step.executions for step in resumed.steps] == [1] * (7 - saved_at)
    # No new compile: the graph is that of the uninterrupted run.
    assert resumed.counts.compiles == 0, resumed.explain()


@isolated
def test_what_is_saved_of_a_replayed_run_is_what_the_traced_one_saves(tmp_path: Path) -> None:
    args: dict[str, Any] = {"max_steps": 9, "save_strategy": "steps", "save_steps": 6}
    folders = [tmp_path / "traced", tmp_path / "replayed"]
    traced, replayed = (
        ours(gpt2(dropout=0.3), token_samples(32), args=arguments(str(folder), **args), step_replay=replay)
        for folder, replay in zip(folders, (False, "auto"), strict=True)
    )
    # Saving sets `config.architectures`, so that the two steps after it are traced.
    assert steps_of(replayed.trainer).train.replays == 5
    assert replayed.losses == traced.losses
    saved = [torch.load(folder / "checkpoint-6" / "optimizer.pt") for folder in folders]
    assert saved[0]["state"].keys() == saved[1]["state"].keys()
    for one, other in zip(saved[0]["state"].values(), saved[1]["state"].values(), strict=True):
        assert all(type(value) is torch.Tensor and torch.equal(value, other[name]) for name, value in one.items())
    resumed = ours(
        gpt2(dropout=0.3, seed=1),
        token_samples(32),
        args=arguments(str(tmp_path / "resumed"), **args),
        train_options={"resume_from_checkpoint": str(folders[1] / "checkpoint-6")},
    )
    assert resumed.losses == traced.losses
    expected = traced.parameters()
    assert all(torch.equal(value, expected[key]) for key, value in resumed.parameters().items())


def _save(folder: str) -> list[float]:
    return ours(gpt2(dropout=0.3), token_samples(16), args=_saving(folder)).losses


def _resume(folder: str) -> tuple[list[float], int, list[int]]:
    run = ours(
        gpt2(dropout=0.3, seed=1),
        token_samples(16),
        args=_saving(folder),
        train_options={"resume_from_checkpoint": f"{folder}/checkpoint-3"},
    )
    return run.losses, run.counts.compiles, [step.executions for step in run.steps]


def _saving(folder: str) -> Any:
    return arguments(
        folder,
        max_steps=6,
        save_strategy="steps",
        save_steps=3,
        gradient_accumulation_steps=1,
        # With dropout it is refused on TorchTPU.
        gradient_checkpointing=not ON_TORCH_TPU,
    )


def test_resume_in_a_new_process_is_exact_and_compiles_once(tmp_path: Path) -> None:
    expected = run_in_child(lambda: _save(str(tmp_path)))
    losses, compiles, executions = run_in_child(lambda: _resume(str(tmp_path)))
    assert losses == expected
    assert compiles == 1
    assert executions == [1] * 3


@isolated
@pytest.mark.parametrize("accumulation", ["per_micro_batch", "unrolled"])
def test_resume_under_accumulation(accumulation: str, tmp_path: Path) -> None:
    args = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "gradient_accumulation_steps": 2}
    options: dict[str, Any] = {"accumulation": accumulation}
    data = vector_samples(24)
    whole = ours(Classifier(dropout=0.4), data, args=arguments(str(tmp_path), **args), **options)
    resumed = ours(
        Classifier(dropout=0.4, seed=1),
        data,
        args=arguments(str(tmp_path), **args),
        train_options={"resume_from_checkpoint": str(tmp_path / "checkpoint-2")},
        **options,
    )
    assert resumed.losses == whole.losses
    assert resumed.counts.compiles == 0, resumed.explain()
