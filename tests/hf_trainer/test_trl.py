"""TRL's trainers under `XLATrainerMixin`: one execution per step, and the losses and metrics of plain CPU torch."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from transformers import LlamaForSequenceClassification

from hf_trainer import XLATrainerMixin
from hf_trainer.libraries import reads_answered
from tests.hf_trainer.scenarios import train
from tests.hf_trainer.text_models import llama, tokenizer
from tests.hf_trainer.trl_runs import (
    arguments_of,
    assert_logs_are_equal,
    assert_one_execution,
    both,
    completion,
    judged,
    pair,
    preference,
    rows_of,
    text,
)
from tests.isolation import isolated
from xla_adapters import GraphBreakWarning

trl = pytest.importorskip("trl")


class SFT(XLATrainerMixin, trl.SFTTrainer):
    pass


class DPO(XLATrainerMixin, trl.DPOTrainer):
    pass


class Reward(XLATrainerMixin, trl.RewardTrainer):
    pass


class KTO(XLATrainerMixin, trl.KTOTrainer):
    pass


class GRPO(XLATrainerMixin, trl.GRPOTrainer):
    pass


class RLOO(XLATrainerMixin, trl.RLOOTrainer):
    pass


def _reward_model() -> Any:
    return llama(LlamaForSequenceClassification, num_labels=1)


@isolated
def test_sft() -> None:
    run, expected = both(SFT, trl.SFTConfig, llama, rows_of(text), args={"logging_steps": 2})
    assert_logs_are_equal(run, expected)
    assert_one_execution(run)
    assert run.logged("num_tokens")[-1] > 0
    # Losses, norms and all metrics of two steps arrive together.
    assert run.counts.transfers_to_host <= 3


@isolated
def test_reward() -> None:
    run, expected = both(Reward, trl.RewardConfig, _reward_model, rows_of(pair), args={})
    # Gradients grow along a run in which the model is certain at once.
    assert_logs_are_equal(run, expected, tolerance=1e-4)
    assert_one_execution(run)


@isolated
def test_dpo() -> None:
    run, expected = both(DPO, trl.DPOConfig, llama, rows_of(preference), args={})
    assert_logs_are_equal(run, expected)
    assert_one_execution(run)


@pytest.mark.slow
@pytest.mark.parametrize("lora", [False, True])
@isolated
def test_dpo_evaluates(lora: bool) -> None:
    rows = rows_of(preference)
    run, expected = both(
        DPO,
        trl.DPOConfig,
        llama,
        rows,
        args={"eval_strategy": "steps", "eval_steps": 2},
        eval_dataset=rows.select(range(6)),
        lora=lora,
    )
    assert_logs_are_equal(run, expected)
    assert_one_execution(run)


_SFT: dict[str, tuple[Callable[[int], dict[str, Any]], dict[str, Any]]] = {
    "prompt and completion": (completion, {}),
    "packing": (text, {"packing": True, "max_length": 32, "per_device_train_batch_size": 1}),
    "LoRA": (text, {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("variant", _SFT)
@isolated
def test_sft_variants(variant: str) -> None:
    make, args = _SFT[variant]
    rows = rows_of(make)
    options = {"lora": variant == "LoRA"}
    if variant == "prompt and completion":
        args, options = {**args, "eval_strategy": "steps", "eval_steps": 2}, {"eval_dataset": rows.select(range(6))}
    run, expected = both(SFT, trl.SFTConfig, llama, rows, args=args, **options)
    assert_logs_are_equal(run, expected)
    assert_one_execution(run)


@pytest.mark.slow
@isolated
def test_kto() -> None:
    run, expected = both(KTO, trl.KTOConfig, llama, rows_of(judged), args={})
    assert_logs_are_equal(run, expected)
    # One graph for each number of desirable completions in a batch.
    assert_one_execution(run, graphs=None)


def _length(completions: list[str], **_: Any) -> list[float]:
    return [float(completion.count("a")) + len(completion) * 0.01 for completion in completions]


@pytest.mark.slow
@isolated
def test_grpo() -> None:
    # With one token to choose from, both sample the same.
    args = {"max_completion_length": 4, "num_generations": 2, "top_k": 1, "max_steps": 3}
    rows = rows_of(lambda index: {"prompt": f"say {index % 10}:"})
    with warnings.catch_warnings():
        warnings.simplefilter("error", GraphBreakWarning)
        run, expected = both(GRPO, trl.GRPOConfig, llama, rows, args=args, reward_funcs=_length)
    assert_logs_are_equal(run, expected)
    assert run.logged("completions/mean_length")[0] > 0


@isolated
def test_extremes_without_a_read_are_trls() -> None:
    utils, nan = trl.trainer.utils, float("nan")
    theirs = [utils.nanmin, utils.nanmax]
    samples = [torch.tensor(values) for values in ([1.0, nan, -2.0], [nan, nan], [3.0], [float("inf"), nan])]
    expected = [[extreme(sample) for sample in samples] for extreme in theirs]

    class Known(SimpleNamespace):
        __module__ = "trl.trainer"

    trainer = Known(model=torch.nn.Identity())
    with reads_answered(cast(Any, trainer)):
        ours = [utils.nanmin, utils.nanmax]
        assert all(getattr(trl.trainer.grpo_trainer, name) not in theirs for name in ("nanmin", "nanmax"))
        found = [[extreme(sample) for sample in samples] for extreme in ours]
    torch.testing.assert_close(found, expected, equal_nan=True)
    assert [utils.nanmin, utils.nanmax] == theirs


@pytest.mark.slow
@isolated
def test_rloo() -> None:
    args = {"max_completion_length": 4, "num_generations": 2, "top_k": 1, "max_steps": 3}
    rows = rows_of(lambda index: {"prompt": f"say {index % 10}:"})
    run, expected = both(RLOO, trl.RLOOConfig, llama, rows, args=args, reward_funcs=_length)
    assert_logs_are_equal(run, expected)
    assert run.logged("completions/mean_length")[0] > 0


@isolated
def test_the_default_precision() -> None:
    # TRL's default is bfloat16 autocast. On the CPU it asks the host whether it has it.
    assert trl.SFTConfig(output_dir=tempfile.mkdtemp(), report_to=[]).bf16
    run, expected = both(SFT, trl.SFTConfig, llama, rows_of(text), args={"bf16": True})
    assert_one_execution(run)
    losses = [entry["loss"] for entry in expected if "loss" in entry]
    assert run.losses == pytest.approx(losses, abs=2e-2)


@pytest.mark.slow
@isolated
def test_grpo_learns() -> None:
    args = {"max_completion_length": 8, "num_generations": 4, "max_steps": 12, "beta": 0.01, "learning_rate": 3e-2}
    rows = rows_of(lambda index: {"prompt": f"say {index % 10}:"})
    trainer = GRPO(
        model=llama(),
        args=arguments_of(trl.GRPOConfig, **args),
        train_dataset=rows,
        processing_class=tokenizer(),
        reward_funcs=_length,
    )
    run = train(trainer)
    rewards = run.logged("reward")
    assert sum(rewards[-4:]) > sum(rewards[:4])
    assert all(loss == loss for loss in run.losses)
