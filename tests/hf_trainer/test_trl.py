"""TRL's trainers under `XLATrainerMixin`: one execution per step, and the losses and metrics of plain CPU torch."""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from transformers import LlamaForSequenceClassification

from hf_trainer import XLATrainerMixin
from hf_trainer.libraries import reads_allowed
from hf_trainer.replay import overridden, reason_around, reason_within
from tests.hf_trainer.scenarios import steps_of, train
from tests.hf_trainer.text_models import llama, tokenizer
from tests.hf_trainer.trl_runs import (
    arguments_of,
    assert_logs_are_equal,
    assert_one_execution,
    assert_replayed,
    both,
    completion,
    judged,
    pair,
    preference,
    rows_of,
    text,
)
from xla_adapters import GraphBreakWarning
from xla_adapters.replay.safety import trusted

pytestmark = pytest.mark.isolated

trl = pytest.importorskip("trl")
ready = pytest.importorskip("hf_trainer.trl")
SFT, DPO, Reward, KTO, GRPO = (getattr(ready, f"{name}Trainer") for name in ("SFT", "DPO", "Reward", "KTO", "GRPO"))


class RLOO(XLATrainerMixin, trl.RLOOTrainer):
    pass


def _reward_model() -> Any:
    return llama(LlamaForSequenceClassification, num_labels=1)


def test_sft() -> None:
    run, expected = both(SFT, trl.SFTConfig, llama, rows_of(text), args={"logging_steps": 2})
    assert_logs_are_equal(run, expected)
    assert_one_execution(run)
    assert_replayed(run)
    assert run.logged("num_tokens")[-1] > 0
    # Losses, norms and all metrics of two steps arrive together.
    assert run.counts.transfers_to_host <= 3


def test_reward() -> None:
    run, expected = both(Reward, trl.RewardConfig, _reward_model, rows_of(pair), args={})
    # Gradients grow along a run in which the model is certain at once.
    assert_logs_are_equal(run, expected, tolerance=1e-4)
    assert_one_execution(run)
    assert_replayed(run)


def test_dpo() -> None:
    run, expected = both(DPO, trl.DPOConfig, llama, rows_of(preference), args={})
    assert_logs_are_equal(run, expected)
    assert_one_execution(run)
    assert_replayed(run)


@pytest.mark.slow
@pytest.mark.parametrize("lora", [False, True])
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
def test_kto() -> None:
    run, expected = both(KTO, trl.KTOConfig, llama, rows_of(judged), args={"max_steps": 8})
    assert_logs_are_equal(run, expected)
    # One graph for each number of desirable completions in a batch.
    assert_one_execution(run, graphs=None)
    assert steps_of(run.trainer).train.replays >= 3


def test_replays_are_their_traces() -> None:
    """To the last bit, also in a step that is traced after an evaluation, and of an epoch's last batch."""
    rows = rows_of(completion, 10)
    args = {"max_steps": 9, "logging_steps": 2, "eval_strategy": "steps", "eval_steps": 4}
    runs = []
    for replay in (False, "auto"):
        trainer = SFT(
            model=llama(),
            args=arguments_of(trl.SFTConfig, **args),
            train_dataset=rows,
            eval_dataset=rows.select(range(7)),
            processing_class=tokenizer(),
            step_replay=replay,
        )
        runs.append(train(trainer))
    traced, replayed = runs
    assert steps_of(traced.trainer).train.replays == 0
    assert steps_of(replayed.trainer).train.replays >= 5
    assert steps_of(replayed.trainer).evaluation["eval_step"].replays >= 2
    assert_logs_are_equal(replayed, traced.trainer.state.log_history, tolerance=0)
    theirs = traced.parameters()
    assert all(torch.equal(value, theirs[name]) for name, value in replayed.parameters().items())


def _own_loss(self: Any, *args: Any, **kwargs: Any) -> Any:
    return super(type(self), self).compute_loss(*args, **kwargs)


def test_what_is_not_known_of_trl_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    def reason(kind: Any = SFT, **changes: Any) -> str | None:
        trainer = kind(
            model=llama(),
            args=arguments_of(trl.SFTConfig),
            train_dataset=rows_of(text, 4),
            processing_class=tokenizer(),
        )
        trainer.create_optimizer()
        for name, value in changes.items():
            setattr(trainer, name, value)
        return reason_around(trainer) or reason_within(trainer)

    assert reason() is None
    changed = type("Changed", (SFT,), {"compute_loss": _own_loss})
    assert "Changed.compute_loss is overridden" in str(reason(changed))
    assert "activation_offloading" in str(reason(maybe_activation_offload_context=ExitStack()))
    assert overridden(RLOO.__new__(RLOO), ("training_step",)) == "RLOOTrainer.training_step"
    for looked_up in (trusted.is_trusted_file, trusted.is_library_file):
        looked_up.cache_clear()
    monkeypatch.setattr(trl, "__version__", "1.16.9")
    assert "SFTTrainer.training_step is overridden" in str(reason())


def _length(completions: list[str], **_: Any) -> list[float]:
    return [float(completion.count("a")) + len(completion) * 0.01 for completion in completions]


@pytest.mark.slow
def test_grpo() -> None:
    # With one token to choose from, both sample the same.
    args = {"max_completion_length": 4, "num_generations": 2, "top_k": 1, "max_steps": 3}
    rows = rows_of(lambda index: {"prompt": f"say {index % 10}:"})
    with warnings.catch_warnings():
        warnings.simplefilter("error", GraphBreakWarning)
        run, expected = both(GRPO, trl.GRPOConfig, llama, rows, args=args, reward_funcs=_length)
    assert_logs_are_equal(run, expected)
    assert run.logged("completions/mean_length")[0] > 0


def test_extremes_without_a_read_are_trls() -> None:
    utils, nan = trl.trainer.utils, float("nan")
    theirs = [utils.nanmin, utils.nanmax]
    samples = [torch.tensor(values) for values in ([1.0, nan, -2.0], [nan, nan], [3.0], [float("inf"), nan])]
    expected = [[extreme(sample) for sample in samples] for extreme in theirs]

    class Known(SimpleNamespace):
        __module__ = "trl.trainer"

    trainer = Known(model=torch.nn.Identity())
    with reads_allowed(cast(Any, trainer)):
        ours = [utils.nanmin, utils.nanmax]
        assert all(getattr(trl.trainer.grpo_trainer, name) not in theirs for name in ("nanmin", "nanmax"))
        found = [[extreme(sample) for sample in samples] for extreme in ours]
    torch.testing.assert_close(found, expected, equal_nan=True)
    assert [utils.nanmin, utils.nanmax] == theirs


@pytest.mark.slow
def test_rloo() -> None:
    args = {"max_completion_length": 4, "num_generations": 2, "top_k": 1, "max_steps": 3}
    rows = rows_of(lambda index: {"prompt": f"say {index % 10}:"})
    run, expected = both(RLOO, trl.RLOOConfig, llama, rows, args=args, reward_funcs=_length)
    assert_logs_are_equal(run, expected)
    assert run.logged("completions/mean_length")[0] > 0


def test_the_default_precision() -> None:
    # TRL's default is bfloat16 autocast. On the CPU it asks the host whether it has it.
    assert trl.SFTConfig(output_dir=tempfile.mkdtemp(), report_to=[]).bf16
    run, expected = both(SFT, trl.SFTConfig, llama, rows_of(text), args={"bf16": True})
    assert_one_execution(run)
    losses = [entry["loss"] for entry in expected if "loss" in entry]
    assert run.losses == pytest.approx(losses, abs=2e-2)


@pytest.mark.parametrize("iterations", [1, 2])
def test_grpo_with_samples_as_on_the_cpu(iterations: int, tmp_path: Path) -> None:
    """One launch for each token, one for the reference, one for the rewards by a model, and the update."""
    sampling: dict[str, Any] = {"max_completion_length": 4, "num_generations": 4, "max_steps": 8, "beta": 0.1}
    args = {**sampling, "num_iterations": iterations, "gradient_checkpointing": True, "seed": 3}
    rows = rows_of(lambda index: {"prompt": f"say {index % 10}:"})

    judge = llama(LlamaForSequenceClassification, num_labels=1)
    judge.config.pad_token_id = 0
    judge.save_pretrained(tmp_path)
    given: dict[str, Any] = {"reward_funcs": str(tmp_path), "reward_processing_classes": tokenizer()}
    run, expected = both(GRPO, trl.GRPOConfig, llama, rows, args=args, **given)
    assert_logs_are_equal(run, expected)
    assert len({entry["reward"] for entry in expected if "reward" in entry}) > 2
    assert max(step.executions for step in run.steps) <= 4 + 4
    program = steps_of(run.trainer).train
    assert program.replays >= 4, program.replay_reasons
    # Of the four tokens of each rollout the first makes the cache. The reference and the rewards are no tokens.
    generation = steps_of(run.trainer).evaluation["generate"]
    assert generation.replays >= 8, generation.replay_reasons


@pytest.mark.slow
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


# ---- variants ---------------------------------------------------------------------------------------


# TRL says of each of these modules that it may change.
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
cpo = pytest.importorskip("trl.experimental.cpo")
gkd = pytest.importorskip("trl.experimental.gkd")
online_dpo = pytest.importorskip("trl.experimental.online_dpo")
orpo = pytest.importorskip("trl.experimental.orpo")

_EVALUATES: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 4}


class CPO(XLATrainerMixin, cpo.CPOTrainer):
    pass


class ORPO(XLATrainerMixin, orpo.ORPOTrainer):
    pass


class OnlineDPO(XLATrainerMixin, online_dpo.OnlineDPOTrainer):
    pass


class Greedy(gkd.GKDTrainer):
    """Generates the same on each device, and learns from the same teacher."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        teacher = llama()
        for parameter in teacher.parameters():
            torch.nn.init.uniform_(parameter, -0.05, 0.05)
        super().__init__(*args, teacher_model=teacher, **kwargs)
        self.generation_config.do_sample = False


class GKD(XLATrainerMixin, Greedy):
    pass


def _prompt(index: int) -> dict[str, Any]:
    return {"prompt": f"say {index % 10}:"}


def test_evaluation_weighs_preferences_by_samples() -> None:
    """Each is two rows of a batch, and the last batch has one of five."""
    rows = rows_of(pair)
    args = {**_EVALUATES, "learning_rate": 1e-3}
    run, expected = both(Reward, trl.RewardConfig, _reward_model, rows, args=args, eval_dataset=rows.select(range(5)))
    assert len(run.logged("eval_loss")) == 2
    assert_logs_are_equal(run, expected)


def _of_preferences(trainer: Any, config: Any, evaluated: int, **args: Any) -> None:
    rows = rows_of(preference)
    run, expected = both(
        trainer, config, llama, rows, args={**_EVALUATES, **args}, eval_dataset=rows.select(range(evaluated))
    )
    assert_logs_are_equal(run, expected)
    assert_one_execution(run)


def test_metrics_that_are_averaged_by_torch() -> None:
    """CPO gives its list of numbers to `torch.tensor`, which takes only floats."""
    _of_preferences(CPO, cpo.CPOConfig, 4, logging_steps=2, max_length=32)


@pytest.mark.slow
def test_a_sync_before_reads_is_left_out() -> None:
    """ORPO syncs the device where torch_xla is installed. There it also pads to `max_length`: others do by rows."""
    run, expected = both(ORPO, orpo.ORPOConfig, llama, rows_of(preference), args={"max_length": 32})
    assert_one_execution(run)
    for name in ("loss", "nll_loss", "log_odds_ratio", "rewards/margins"):
        theirs = [entry[name] for entry in expected if name in entry]
        assert len(theirs) == 4
        assert run.logged(name) == pytest.approx(theirs, rel=1e-5, abs=1e-5)


@pytest.mark.slow
def test_reference_computed_before_the_training() -> None:
    """By a loop of TRL's own over a loader that accelerate prepared."""
    _of_preferences(DPO, trl.DPOConfig, 6, precompute_ref_log_probs=True)


@pytest.mark.slow
def test_grpo_evaluates() -> None:
    """Evaluation generates too, and the step after it trains in the training mode."""
    args = {**_EVALUATES, "eval_steps": 1, "max_completion_length": 4, "num_generations": 2, "top_k": 1, "max_steps": 2}
    options = {"reward_funcs": _length, "eval_dataset": rows_of(_prompt, 4)}
    run, expected = both(GRPO, trl.GRPOConfig, llama, rows_of(_prompt), args=args, **options)
    assert_logs_are_equal(run, expected)
    assert len(run.logged("eval_reward")) == len(run.logged("reward")) == 2


@pytest.mark.slow
def test_a_selection_that_decides() -> None:
    """GRPO's mask of tokens of high entropy takes a quantile of what it selects: the step has parts."""
    args = {"max_completion_length": 4, "num_generations": 2, "top_k": 1, "max_steps": 2, "top_entropy_quantile": 0.5}
    with pytest.warns(GraphBreakWarning, match=r"grpo_trainer.py:\d+ in get_high_entropy_mask"):
        run, expected = both(GRPO, trl.GRPOConfig, llama, rows_of(_prompt), args=args, reward_funcs=_length)
    assert_logs_are_equal(run, expected)


@pytest.mark.slow
def test_online_dpo() -> None:
    """It generates in `training_step`, and decodes there: the step goes on afterwards."""
    # Both completions of a prompt are the same, so gradients are zero but for rounding.
    args = {"max_new_tokens": 4, "max_length": 24, "top_k": 1, "max_steps": 2, "adam_epsilon": 1e-3}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GraphBreakWarning)
        run, expected = both(
            OnlineDPO, online_dpo.OnlineDPOConfig, llama, rows_of(_prompt), args=args, reward_funcs=_length
        )
    assert_logs_are_equal(run, expected)


def _chat(index: int) -> dict[str, Any]:
    turns = (("user", f"hi {index % 5}"), ("assistant", f"yo {index % 7}"))
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


@pytest.mark.slow
def test_distillation_on_what_the_model_generates() -> None:
    chat = tokenizer()
    chat.chat_template = (
        "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}a:{% endif %}"
    )

    args = {"lmbda": 1.0, "max_new_tokens": 4, "max_length": 48, "max_steps": 2}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GraphBreakWarning)
        run, expected = both(GKD, gkd.GKDConfig, llama, rows_of(_chat), args=args, processing_class=chat)
    assert_logs_are_equal(run, expected)
