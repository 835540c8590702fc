"""Replayed steps of the Trainer are bit-identical to traced ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import BatchEncoding, DynamicCache, TrainerCallback

import hf_trainer
import xla_adapters
from tests.device import DEVICE
from tests.hf_trainer.scenarios import (
    Classifier,
    arguments,
    gpt2,
    ours,
    steps_of,
    token_samples,
    traced_and_replayed,
    vector_samples,
)
from tests.isolation import isolated


@isolated
def test_one_graph_and_the_same_numbers() -> None:
    run = traced_and_replayed(8, make=lambda: gpt2(dropout=0.2), args={"max_steps": 10, "warmup_steps": 3})
    run.assert_one_graph(10)


@pytest.mark.parametrize("accumulated", [1, 2])
@isolated
def test_what_a_replay_takes_outlives_the_execution(accumulated: int) -> None:
    """Also the sum of losses and the gradients. The former value of a tensor waits for the device."""
    run = ours(gpt2(), token_samples(32), args=arguments(max_steps=8, gradient_accumulation_steps=accumulated))
    assert steps_of(run.trainer).train.replays
    runtime: Any = xla_adapters.get_runtime()
    values = [value for taken in runtime.executables._graphs._taken._taken for value in taken]
    assert values
    assert not any(torch._is_functional_tensor(value) for value in values)


@pytest.mark.parametrize(
    "options", [{"bf16": True}, {"optim": "sgd", "max_grad_norm": 0.0}, {"label_smoothing_factor": 0.1}], ids=str
)
@isolated
def test_options(options: dict[str, Any]) -> None:
    traced_and_replayed(6, args={"max_steps": 8, **options})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "recordings"),
    [
        ({"gradient_accumulation_steps": 2, "lr_scheduler_type": "cosine", "warmup_steps": 20}, 2),
        ({"bf16": True, "weight_decay": 0.03, "lr_scheduler_type": "linear"}, 1),
    ],
    ids=["accumulation", "bf16"],
)
@isolated(timeout=400)
def test_two_hundred_steps(options: dict[str, Any], recordings: int) -> None:
    args = {"max_steps": 200, "max_grad_norm": 0.5, **options}
    traced_and_replayed(198 * recordings, recordings=recordings, make=lambda: gpt2(dropout=0.2), args=args)


@isolated
def test_gradients_that_appear_behind_a_replayed_step_are_dropped() -> None:
    """By the loop's `model.zero_grad()`, which returns early only if there are no gradients."""
    seen: list[tuple[int, bool]] = []

    class Interferes(torch.optim.lr_scheduler.LambdaLR):
        def step(self, *args: Any, **kwargs: Any) -> None:
            super().step(*args, **kwargs)
            self.steps = getattr(self, "steps", 0) + 1
            if self.steps == 6:
                model.transformer.wpe.weight.grad = torch.ones_like(model.transformer.wpe.weight)

    class Looks(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.append((state.global_step, model.transformer.wpe.weight.grad is None))

    model = gpt2().to(DEVICE)
    model.transformer.wpe.weight.requires_grad_(False)
    optimizer = torch.optim.AdamW([item for item in model.parameters() if item.requires_grad], lr=1e-3)
    scheduler = Interferes(optimizer, lambda step: 1.0)
    before = torch.nn.Module.zero_grad
    run = ours(
        model,
        token_samples(32),
        args=arguments(max_steps=8),
        optimizers=(optimizer, scheduler),
        callbacks=[Looks()],
    )
    assert steps_of(run.trainer).train.replays == 6, steps_of(run.trainer).train.replay_reasons
    assert seen == [(step, True) for step in range(1, 9)]
    assert torch.nn.Module.zero_grad is before


@isolated
def test_accumulation() -> None:
    args = {"max_steps": 6, "gradient_accumulation_steps": 3}
    run = traced_and_replayed(12, recordings=3, data=token_samples(36), args=args)
    run.assert_one_graph(6, graphs=3, executions_per_step=3)


def _encoded(samples: list[dict[str, Any]]) -> BatchEncoding:
    """A batch as `DataCollatorWithPadding` returns it: a mapping that is not a dict."""
    return BatchEncoding(torch.utils.data.default_collate(samples))


@isolated
def test_a_batch_that_is_no_dict_is_replayed() -> None:
    traced_and_replayed(6, args={"max_steps": 8}, data_collator=_encoded)


def _with_a_stranger(samples: list[dict[str, Any]]) -> dict[str, Any]:
    return {**torch.utils.data.default_collate(samples), "past_key_values": DynamicCache()}


@isolated
def test_a_batch_with_a_value_nobody_can_compare_is_traced() -> None:
    run = traced_and_replayed(0, args={"max_steps": 4}, data_collator=_with_a_stranger)
    assert any("DynamicCache" in reason for reason in steps_of(run.trainer).train.replay_reasons)


@isolated
def test_evaluation_in_between_does_not_end_it() -> None:
    data = vector_samples(16)
    run = traced_and_replayed(
        10,
        make=lambda: Classifier(dropout=0.5),
        data=data,
        args={"max_steps": 12, "eval_strategy": "steps", "eval_steps": 3},
        eval_dataset=data,
    )
    assert len(run.logged("eval_loss")) == 4
    assert steps_of(run.trainer).evaluation["eval_step"].replays == 13


@isolated
def test_a_callback_that_changes_the_rate_takes_effect_at_once() -> None:
    class Halving(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 6:
                for group in kwargs["optimizer"].param_groups:
                    group["weight_decay"] *= 3
                    group["betas"] = (0.7, 0.9)

    traced_and_replayed(8, args={"max_steps": 10, "weight_decay": 0.2}, callbacks=[Halving()])


@isolated
def test_freezing_a_layer_is_traced_again() -> None:
    class Freezing(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 6:
                for parameter in kwargs["model"].layers[0].parameters():
                    parameter.requires_grad_(False)

    run = traced_and_replayed(
        8, make=Classifier, data=vector_samples(32), args={"max_steps": 12}, callbacks=[Freezing()]
    )
    assert any("requires_grad" in reason for reason in steps_of(run.trainer).train.replay_reasons)


class _OwnLoss(hf_trainer.Trainer):
    seen = 0

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        self.seen += 1
        return super().compute_loss(*args, **kwargs)


@pytest.mark.parametrize(("replay", "seen"), [("auto", 8), (True, 2)])
@isolated
def test_overridden_compute_loss(replay: bool | str, seen: int) -> None:
    run = ours(gpt2(), token_samples(32), args=arguments(max_steps=8), trainer_class=_OwnLoss, step_replay=replay)
    assert run.trainer.seen == seen
    assert run.counts.compiles == 1
    if replay == "auto":
        assert any("_OwnLoss.compute_loss" in reason for reason in steps_of(run.trainer).train.replay_reasons)


class _Counting(Classifier):
    calls = 0

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        type(self).calls += 1
        return super().forward(x, labels)


@pytest.mark.parametrize(("replay", "calls"), [("auto", 8), (True, 2)])
@isolated
def test_a_forward_of_ones_own_runs_each_time_unless_replay_was_asked_for(replay: bool | str, calls: int) -> None:
    run = ours(_Counting(), vector_samples(32), args=arguments(max_steps=8), step_replay=replay)
    assert _Counting.calls == calls
    if replay == "auto":
        reasons = steps_of(run.trainer).train.replay_reasons
        assert any("it uses type" in reason for reason in reasons), reasons


@isolated
def test_a_callback_in_the_middle_of_the_step_is_not_left_out() -> None:
    class Scaling(TrainerCallback):
        calls = 0

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.calls += 1
            for parameter in kwargs["model"].parameters():
                parameter.grad.mul_(0.5)

    scaling = Scaling()
    run = ours(gpt2(), token_samples(32), args=arguments(max_steps=6), callbacks=[scaling])
    assert scaling.calls == 6
    assert steps_of(run.trainer).train.replays == 0


@pytest.mark.parametrize("steps", [8, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.parametrize("sharding", ["dp", "fsdp"])
@isolated(env={"CPU_NUM_DEVICES": "8"}, timeout=400)
def test_under_spmd(sharding: str, steps: int) -> None:
    xla_adapters.initialize(spmd=True)
    run = traced_and_replayed(
        steps - 2,
        make=lambda: gpt2(dropout=0.1),
        data=token_samples(64),
        args={"max_steps": steps, "per_device_train_batch_size": 8},
        sharding=sharding,
    )
    run.assert_one_graph(steps)


class _Weighted(hf_trainer.Trainer):
    weight = 0.5

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = self.weight * torch.nn.functional.cross_entropy(outputs["logits"], labels)
        return (loss, outputs) if return_outputs else loss


@isolated
def test_a_loss_of_ones_own_that_does_nothing_else_is_replayed() -> None:
    class Reweighting(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            _Weighted.weight = 0.5

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 6:
                _Weighted.weight = 0.25

    run = traced_and_replayed(
        8,
        make=Classifier,
        data=vector_samples(32),
        args={"max_steps": 12},
        trainer_class=_Weighted,
        callbacks=[Reweighting()],
    )
    assert steps_of(run.trainer).train.replay_reasons == {"self.weight was replaced": 1}


@isolated
def test_evaluation_and_prediction_steps() -> None:
    found = []
    for choice in (False, "auto"):
        data = vector_samples(24)
        run = ours(Classifier(), data, args=arguments(max_steps=2), step_replay=choice, eval_dataset=data)
        trainer = run.trainer
        metrics = [trainer.evaluate()["eval_loss"] for _ in range(2)]
        predicted = trainer.predict(data)
        found.append((metrics, predicted.predictions, predicted.label_ids))
        assert steps_of(trainer).evaluation["eval_step"].replays == (0 if choice is False else 13), steps_of(
            trainer
        ).evaluation.replay_reasons
    assert found[0][0] == found[1][0]
    assert (found[0][1] == found[1][1]).all()
    assert (found[0][2] == found[1][2]).all()
