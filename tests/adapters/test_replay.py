"""`step_replay` in both trainers: runs whose steps are replayed are those that are traced, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

import xla_adapters
from tests.hf_trainer.scenarios import Classifier, gpt2, token_samples, vector_samples
from tests.isolation import isolated
from tests.support import differences
from tests.trainers import Moment, Training, each_trainer, optimizer_of, train
from xla_adapters import XLAConfig

pytestmark = pytest.mark.isolated

# Steps that are traced before the first that is replayed; Lightning makes the metrics of `self.log` in one more.
TRACED = {"hf": 2, "lightning": 3}


def state_of(run: Training) -> dict[str, Any]:
    """Weights and optimizer state on the host."""
    saved = optimizer_of(run.trainer).state_dict()["state"]
    return run.weights() | {
        f"{index} {name}": torch.as_tensor(value).cpu()
        for index, values in saved.items()
        for name, value in values.items()
    }


def traced_and_replayed(
    kind: str,
    *,
    net: Callable[[], nn.Module],
    data: Any,
    traced: int | None = None,
    config: dict[str, Any] | None = None,
    **options: Any,
) -> Training:
    """Trains twice in one epoch, traced and replayed, and compares losses, weights, optimizer state and executions.

    Args:
        kind: of the trainer.
        net: makes the model.
        data: as many samples as are trained with.
        traced: how many batches the second run traces; those before the first replay if it is None.
        config: options of `XLAConfig`.
        **options: of `train`.
    """
    runs = []
    for mode in (False, "auto"):
        chosen: dict[str, Any] = {"step_replay": mode, "replay_verify_every": None, **(config or {})}
        runs.append(train(kind, net=net(), data=data, config=XLAConfig(**chosen), **options))
    one, other = runs
    batches = sum(step.executions for step in one.counted)
    assert one.program.replays == 0
    expected = batches - (TRACED[kind] if traced is None else traced)
    assert other.program.replays == expected, other.program.replay_reasons
    assert len(one.losses) > 0
    assert one.losses == other.losses
    assert one.evaluations == other.evaluations
    assert differences(state_of(one), state_of(other)) == []
    assert [step.executions for step in one.counted] == [step.executions for step in other.counted]
    # Calls that are not replayed use the executables of the first run.
    assert other.counts.compiles <= one.counts.compiles
    return other


def language(count: int = 32, **options: Any) -> dict[str, Any]:
    """A language model and its data."""
    return {"net": lambda: gpt2(**options), "data": token_samples(count)}


def vectors(count: int = 48, net: Any = Classifier, **options: Any) -> dict[str, Any]:
    return {"net": lambda: net(**options), "data": vector_samples(count)}


@each_trainer
def test_one_graph_and_the_same_numbers(kind: str) -> None:
    stock = {"warmup_steps": 3} if kind == "hf" else {}
    run = traced_and_replayed(kind, steps=10, stock=stock, **language(40, dropout=0.2))
    assert [step.executions for step in run.counted] == [1] * 10
    assert run.counts.compiles <= 1


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *((kind, options) for kind in ("hf", "lightning") for options in ({"bf16": True}, {"clip": 0.1})),
        ("hf", {"optimizer": "sgd", "clip": 0.0}),
        ("hf", {"stock": {"label_smoothing_factor": 0.1}}),
        ("lightning", {"optimizer": "sgd"}),
        ("lightning", {"clip": 0.1, "stock": {"gradient_clip_algorithm": "value"}}),
    ],
    ids=str,
)
def test_options(kind: str, options: dict[str, Any]) -> None:
    traced_and_replayed(kind, **language(dropout=0.1), **options)


@each_trainer
def test_accumulation(kind: str) -> None:
    """Each kind of micro batch is traced before it is replayed."""
    run = traced_and_replayed(
        kind, steps=6, accumulate=3, traced={"hf": 6, "lightning": 7}[kind], **language(72, dropout=0.1)
    )
    assert [step.executions for step in run.counted] == [3] * 6


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        pytest.param("hf", {"accumulate": 2}, marks=pytest.mark.long),
        pytest.param("lightning", {"bf16": True}, marks=pytest.mark.slow),
    ],
)
@isolated(timeout=400)
def test_two_hundred_steps(kind: str, options: dict[str, Any]) -> None:
    count = options.get("accumulate", 1)
    stock = {"lr_scheduler_type": "cosine", "warmup_steps": 20, "weight_decay": 0.03} if kind == "hf" else {}
    traced = count * 2 + (kind == "lightning")
    data = language(800 * count, dropout=0.2)
    traced_and_replayed(kind, steps=200, clip=0.5, stock=stock, traced=traced, **data, **options)


@each_trainer
def test_evaluation_in_between_does_not_end_it(kind: str) -> None:
    traced = 5 if kind == "lightning" else None
    run = traced_and_replayed(kind, steps=12, evaluate_every=3, traced=traced, **vectors(dropout=0.5))
    assert len(run.evaluations) == 4


@each_trainer
def test_changes_between_steps_take_effect_at_once(kind: str) -> None:
    def change(moment: Moment) -> None:
        layers: Any = moment.model.layers
        if moment.step == 6:
            for group in moment.optimizer.param_groups:
                group["weight_decay"] = 0.6
                group["betas"] = (0.7, 0.9)
        if moment.step == 10:
            layers[0].weight.requires_grad_(False)
        if moment.step == 15:
            layers[2].p = 0.9

    # Numbers are inputs of the graph; the other changes are traced, twice each. With the HF Trainer a decay where there
    # was none is such a change; with Lightning the gradient of the frozen weight is dropped in a call of its own.
    run = traced_and_replayed(kind, steps=20, at={"step end": change}, traced=8, **vectors(80, dropout=0.2))
    assert any("requires_grad" in reason for reason in run.program.replay_reasons)


class _Scaled(Classifier):
    scale = 1.0

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        results = super().forward(x, labels)
        return {**results, "loss": results["loss"] * self.scale}


@each_trainer
def test_what_the_step_reads_is_followed(kind: str) -> None:
    def change(moment: Moment) -> None:
        type(moment.model).scale = 0.5 if 6 <= moment.step < 12 else 1.0  # type: ignore[attr-defined]

    run = traced_and_replayed(kind, steps=12, at={"step end": change}, traced=TRACED[kind] + 2, **vectors(net=_Scaled))
    assert len(run.program.replay_reasons) == 1


class _Counting(Classifier):
    calls = 0

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        type(self).calls += 1
        return super().forward(x, labels)


@each_trainer
@pytest.mark.parametrize("replay", ["auto", True])
def test_a_forward_of_ones_own_runs_each_time_unless_replay_was_asked_for(kind: str, replay: Any) -> None:
    run = train(kind, net=_Counting(), data=vector_samples(32), step_replay=replay)
    assert _Counting.calls == (8 if replay == "auto" else TRACED[kind])
    if replay == "auto":
        assert any("it uses type" in reason for reason in run.program.replay_reasons), run.program.replay_reasons


@each_trainer
def test_a_callback_in_the_middle_of_the_step_is_not_left_out(kind: str) -> None:
    calls: list[int] = []

    def scale(moment: Moment) -> None:
        calls.append(moment.step)
        for parameter in moment.model.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(0.5)

    run = traced_and_replayed(kind, steps=6, at={"update": scale}, traced=6, **language(24))
    assert calls == [1, 2, 3, 4, 5, 6] * 2
    assert run.program.replay_reasons


_SHARDED = list(product(("dp", "fsdp"), (8,), ("hf", "lightning")))
_LONGER = [("dp", 200, "hf"), ("fsdp", 200, "lightning")]


@pytest.mark.parametrize(
    ("sharding", "steps", "kind"), [*_SHARDED, *(pytest.param(*run, marks=pytest.mark.slow) for run in _LONGER)]
)
@isolated(env={"CPU_NUM_DEVICES": "8"}, timeout=400)
def test_under_spmd(kind: str, sharding: str, steps: int) -> None:
    xla_adapters.initialize(spmd=True)
    run = traced_and_replayed(kind, steps=steps, batch=8, sharding=sharding, **language(8 * steps, dropout=0.1))
    assert [step.executions for step in run.counted] == [1] * steps
