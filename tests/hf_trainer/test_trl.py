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

from benchmarks.ecosystem.text import llama, tokenizer
from hf_trainer import XLATrainerMixin
from hf_trainer.libraries import reads_answered
from tests.hf_trainer.scenarios import Run, train, without_xla
from tests.isolation import isolated
from xla_adapters import GraphBreakWarning, get_runtime

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")

# Log-probabilities of sequences are sums over tokens, about -100.
_TOLERANCE = 1e-5
_TIMES = ("runtime", "per_second", "step_time", "flos")


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


def _rows(make: Callable[[int], dict[str, Any]], count: int = 24) -> Any:
    return datasets.Dataset.from_list([make(index) for index in range(count)])


def _text(index: int) -> dict[str, Any]:
    return {"text": f"row {index % 10} " * 3}


def _completion(index: int) -> dict[str, Any]:
    return {"prompt": f"q{index % 10}:", "completion": f" a{index % 7}"}


def _preference(index: int) -> dict[str, Any]:
    return {"prompt": f"q{index % 10}:", "chosen": f" good {index % 10}", "rejected": f" bad {index % 7}"}


def _pair(index: int) -> dict[str, Any]:
    return {"chosen": f"q{index % 10}: good", "rejected": f"q{index % 10}: bad{index % 7}"}


def _judged(index: int) -> dict[str, Any]:
    return {**_completion(index), "label": index % 3 > 0}


def _arguments(kind: Any, **options: Any) -> Any:
    defaults = {
        "output_dir": tempfile.mkdtemp(),
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 3,
        "max_steps": 4,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "bf16": False,
    }
    return kind(**{**defaults, **options})


def _both(
    kind: Any,
    config: Any,
    make: Callable[[], Any],
    rows: Any,
    *,
    args: dict[str, Any],
    lora: bool = False,
    **options: Any,
) -> tuple[Run, list[dict[str, Any]]]:
    """Our run, and what the stock trainer logs on plain CPU torch."""
    stock = kind.__mro__[2]

    def more() -> dict[str, Any]:
        peft = pytest.importorskip("peft") if lora else None
        adapter = (
            {} if peft is None else {"peft_config": peft.LoraConfig(r=2, target_modules=["q_proj"], lora_dropout=0.0)}
        )
        return {"train_dataset": rows, "processing_class": tokenizer(), **adapter, **options}

    with without_xla():
        reference = stock(model=make(), args=_arguments(config, use_cpu=True, **args), **more())
        reference.train()
    get_runtime().device.initialize()
    run = train(kind(model=make(), args=_arguments(config, **args), **more()))
    return run, reference.state.log_history


def _assert_logs_are_equal(run: Run, expected: list[dict[str, Any]], tolerance: float = _TOLERANCE) -> None:
    logged = [
        {name: value for name, value in entry.items() if not name.startswith("xla/")}
        for entry in run.trainer.state.log_history
    ]
    assert len(logged) == len(expected) > 0
    for ours, theirs in zip(logged, expected, strict=True):
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            if not any(part in name for part in _TIMES):
                assert type(ours[name]) is type(value), name
                assert ours[name] == pytest.approx(value, rel=tolerance, abs=tolerance), name


def _assert_one_execution(run: Run, *, graphs: int | None = 1) -> None:
    assert [step.executions for step in run.steps] == [1] * len(run.steps), run.explain()
    assert [step.transfers_to_host for step in run.steps] == [0] * len(run.steps), run.explain()
    if graphs is not None:
        assert sum(step.compiles for step in run.steps) == graphs, run.explain()


@isolated
def test_sft() -> None:
    run, expected = _both(SFT, trl.SFTConfig, llama, _rows(_text), args={"logging_steps": 2})
    _assert_logs_are_equal(run, expected)
    _assert_one_execution(run)
    assert run.logged("num_tokens")[-1] > 0
    # Losses, norms and all metrics of two steps arrive together.
    assert run.counts.transfers_to_host <= 3


@isolated
def test_reward() -> None:
    run, expected = _both(Reward, trl.RewardConfig, _reward_model, _rows(_pair), args={})
    # Gradients grow along a run in which the model is certain at once.
    _assert_logs_are_equal(run, expected, tolerance=1e-4)
    _assert_one_execution(run)


@isolated
def test_dpo() -> None:
    run, expected = _both(DPO, trl.DPOConfig, llama, _rows(_preference), args={})
    _assert_logs_are_equal(run, expected)
    _assert_one_execution(run)


@pytest.mark.slow
@pytest.mark.parametrize("lora", [False, True])
@isolated
def test_dpo_evaluates(lora: bool) -> None:
    rows = _rows(_preference)
    run, expected = _both(
        DPO,
        trl.DPOConfig,
        llama,
        rows,
        args={"eval_strategy": "steps", "eval_steps": 2},
        eval_dataset=rows.select(range(6)),
        lora=lora,
    )
    _assert_logs_are_equal(run, expected)
    _assert_one_execution(run)


_SFT: dict[str, tuple[Callable[[int], dict[str, Any]], dict[str, Any]]] = {
    "prompt and completion": (_completion, {}),
    "packing": (_text, {"packing": True, "max_length": 32, "per_device_train_batch_size": 1}),
    "LoRA": (_text, {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("variant", _SFT)
@isolated
def test_sft_variants(variant: str) -> None:
    make, args = _SFT[variant]
    rows = _rows(make)
    options = {"lora": variant == "LoRA"}
    if variant == "prompt and completion":
        args, options = {**args, "eval_strategy": "steps", "eval_steps": 2}, {"eval_dataset": rows.select(range(6))}
    run, expected = _both(SFT, trl.SFTConfig, llama, rows, args=args, **options)
    _assert_logs_are_equal(run, expected)
    _assert_one_execution(run)


@pytest.mark.slow
@isolated
def test_kto() -> None:
    run, expected = _both(KTO, trl.KTOConfig, llama, _rows(_judged), args={})
    _assert_logs_are_equal(run, expected)
    # One graph for each number of desirable completions in a batch.
    _assert_one_execution(run, graphs=None)


def _length(completions: list[str], **_: Any) -> list[float]:
    return [float(completion.count("a")) + len(completion) * 0.01 for completion in completions]


@pytest.mark.slow
@isolated
def test_grpo() -> None:
    # With one token to choose from, both sample the same.
    args = {"max_completion_length": 4, "num_generations": 2, "top_k": 1, "max_steps": 3}
    rows = _rows(lambda index: {"prompt": f"say {index % 10}:"})
    with warnings.catch_warnings():
        warnings.simplefilter("error", GraphBreakWarning)
        run, expected = _both(GRPO, trl.GRPOConfig, llama, rows, args=args, reward_funcs=_length)
    _assert_logs_are_equal(run, expected)
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
    rows = _rows(lambda index: {"prompt": f"say {index % 10}:"})
    run, expected = _both(RLOO, trl.RLOOConfig, llama, rows, args=args, reward_funcs=_length)
    _assert_logs_are_equal(run, expected)
    assert run.logged("completions/mean_length")[0] > 0


@isolated
def test_the_default_precision() -> None:
    # TRL's default is bfloat16 autocast. On the CPU it asks the host whether it has it.
    assert trl.SFTConfig(output_dir=tempfile.mkdtemp(), report_to=[]).bf16
    run, expected = _both(SFT, trl.SFTConfig, llama, _rows(_text), args={"bf16": True})
    _assert_one_execution(run)
    losses = [entry["loss"] for entry in expected if "loss" in entry]
    assert run.losses == pytest.approx(losses, abs=2e-2)


@pytest.mark.slow
@isolated
def test_grpo_learns() -> None:
    args = {"max_completion_length": 8, "num_generations": 4, "max_steps": 12, "beta": 0.01, "learning_rate": 3e-2}
    rows = _rows(lambda index: {"prompt": f"say {index % 10}:"})
    trainer = GRPO(
        model=llama(),
        args=_arguments(trl.GRPOConfig, **args),
        train_dataset=rows,
        processing_class=tokenizer(),
        reward_funcs=_length,
    )
    run = train(trainer)
    rewards = run.logged("reward")
    assert sum(rewards[-4:]) > sum(rewards[:4])
    assert all(loss == loss for loss in run.losses)
