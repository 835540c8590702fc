"""What stock `transformers.Trainer` gets wrong on XLA, and that ours does not.

One test per defect. Its first half documents stock: when it fails, upstream has fixed the defect, and
what works around it here can go.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

import hf_trainer
import xla_adapters
from tests.hf_trainer.scenarios import (
    Classifier,
    Sample,
    arguments,
    assert_close,
    gpt2,
    on_cpu,
    token_samples,
    vector_samples,
)
from tests.isolation import isolated
from xla_adapters import StepCounters, get_runtime

pytestmark = pytest.mark.slow


def _stock(model: Any, data: Any, **options: Any) -> transformers.Trainer:
    get_runtime().device.initialize()
    return _without_our_device(model, data, **options)


def _without_our_device(model: Any, data: Any, **options: Any) -> transformers.Trainer:
    options.setdefault("optim", "adamw_torch")
    eval_dataset = options.pop("eval_dataset", None)
    trainer = transformers.Trainer(
        model=model, args=arguments(**options), train_dataset=data, eval_dataset=eval_dataset
    )
    assert trainer.args.device.type == "xla"
    return trainer


def _ours(model: Any, data: Any, **options: Any) -> hf_trainer.Trainer:
    eval_dataset = options.pop("eval_dataset", None)
    return hf_trainer.Trainer(model=model, args=arguments(**options), train_dataset=data, eval_dataset=eval_dataset)


def _losses(trainer: transformers.Trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@isolated
def test_default_optimizer_crashes() -> None:
    stock = _stock(Classifier(), vector_samples(16), optim="adamw_torch_fused")
    with pytest.raises(RuntimeError, match="fused=True"):
        stock.train()
    trainer = _ours(Classifier(), vector_samples(16))
    assert trainer.args.optim == "adamw_torch_fused"  # the default, not set here
    trainer.train()
    assert trainer.state.global_step == 4


def _count_training(trainer: transformers.Trainer) -> StepCounters:
    with xla_adapters.count() as counts:
        trainer.train()
    return counts


@isolated
def test_host_read_in_every_forward() -> None:
    options = {"max_steps": 6, "logging_steps": 100, "logging_first_step": False}
    stock = _count_training(_stock(gpt2(), token_samples(24), **options))
    ours = _count_training(_ours(gpt2(), token_samples(24), **options))
    # Stock: at least one read per forward, each of which splits the step in two graphs.
    assert stock.transfers_to_host >= 6
    assert stock.executions >= 2 * 6
    assert stock.compiles > 1
    # Ours: the loss at the end, and nothing else.
    assert ours.transfers_to_host == 1
    assert (ours.compiles, ours.executions) == (1, 6)


@isolated
def test_eval_loss_with_a_partial_last_batch() -> None:
    data = vector_samples(10)
    with on_cpu(Classifier(), None, eval_dataset=data) as trainer:
        right = trainer.evaluate()["eval_loss"]
    wrong = _stock(Classifier(), None, eval_dataset=data).evaluate()["eval_loss"]
    assert abs(wrong - right) > 1e-4
    assert_close([_ours(Classifier(), None, eval_dataset=data).evaluate()["eval_loss"]], [right], 1e-6)


@isolated
def test_same_seed_runs_differ_under_dropout() -> None:
    def run(make: Any) -> list[float]:
        trainer = make(Classifier(dropout=0.5), vector_samples(16))
        trainer.train()
        return _losses(trainer)

    # With our device, torch's seeds seed that of the stock trainer, too.
    assert run(_without_our_device) != run(_without_our_device)
    assert run(_ours) == run(_ours)


@isolated
def test_gradient_checkpointing_fails() -> None:
    with pytest.raises(AttributeError, match="xla"):
        _stock(gpt2(), token_samples(16), gradient_checkpointing=True).train()
    trainer = _ours(gpt2(), token_samples(16), gradient_checkpointing=True)
    trainer.train()
    assert trainer.state.global_step == 4


class Broken(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Its fourth batch cannot be read."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Sample:
        if index == 13:
            raise ValueError("sample 13 is broken")
        return vector_samples(20)[index]


@isolated
def test_dataset_exceptions_are_swallowed() -> None:
    options: dict[str, Any] = {"num_train_epochs": 1, "max_steps": -1, "train_sampling_strategy": "sequential"}
    stock = _stock(Classifier(), Broken(), **options)
    # The epoch ends early, as if all were well.
    stock.train()
    assert stock.state.global_step < 5
    with pytest.raises(ValueError, match="sample 13 is broken"):
        _ours(Classifier(), Broken(), **options).train()
