"""Tiny models, data and runs shared by the trainer's tests, and the same runs on plain CPU torch.

Everything here computes with torch, so call it only inside isolated tests.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from accelerate.state import AcceleratorState
from torch import nn
from transformers import TrainerCallback, TrainingArguments

import hf_trainer
import xla_adapters
from tests.device import ON_TORCH_TPU
from tests.plain_cpu import without_xla
from tests.support import differences
from tests.tiny_models import VOCABULARY, tiny
from xla_adapters import StepCounters, get_runtime
from xla_adapters.loop.steps import StepDriver
from xla_adapters.replay.verification import FIRST

TOLERANCE = 1e-5
Sample = dict[str, Any]


# ---- models and data ---------------------------------------------------------------------------------


def gpt2(*, dropout: float = 0.0, layers: int = 1, seed: int = 0, **options: Any) -> Any:
    """A causal language model with every part of the real one."""
    drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    # TorchTPU's attention is a kernel for TPUs, which the stand-in for one cannot run.
    attention = {"attn_implementation": "eager"} if ON_TORCH_TPU else {}
    return tiny("gpt2", seed=seed, n_layer=layers, **drops, **attention, **options)


class Classifier(nn.Module):
    """A classifier of a few operations, for tests of the loop around the model."""

    def __init__(self, dropout: float = 0.0, seed: int = 0, width: int = 8) -> None:
        super().__init__()
        torch.manual_seed(seed)
        # Not Dropout(0): torch_xla 2.9 returns wrong outputs for it under torch.compile.
        drop = nn.Dropout(dropout) if dropout else nn.Identity()
        self.layers = nn.Sequential(nn.Linear(4, width), nn.Tanh(), drop, nn.Linear(width, 3))

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        logits = self.layers(x)
        if labels is None:
            return {"logits": logits}
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def token_samples(count: int, *, length: int = 8, seed: int = 0) -> list[Sample]:
    """Random token sequences with themselves as labels."""
    tokens = torch.randint(0, VOCABULARY, (count, length), generator=torch.Generator().manual_seed(seed))
    # Without a mask transformers computes a sum that the stand-in for a TPU cannot compile.
    mask = {"attention_mask": torch.ones(length, dtype=torch.long)} if ON_TORCH_TPU else {}
    return [{"input_ids": row, "labels": row.clone(), **mask} for row in tokens]


def vector_samples(count: int, *, seed: int = 0) -> list[Sample]:
    """Samples for `Classifier`: the class is a function of the vector, so it can be learned."""
    vectors = torch.randn(count, 4, generator=torch.Generator().manual_seed(seed))
    return [{"x": row, "labels": int(row[:3].argmax())} for row in vectors]


# ---- runs --------------------------------------------------------------------------------------------


class CountEachStep(TrainerCallback):
    """Counts what happens on the device from the first micro batch to the end of the optimizer step."""

    def __init__(self) -> None:
        self.steps: list[StepCounters] = []
        self._stack: Any = None

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self._stack = xla_adapters.count()
        self.steps.append(self._stack.__enter__())

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self._stack.__exit__(None, None, None)


@dataclass
class Run:
    """A finished training run.

    Attributes:
        trainer: the trainer.
        counts: compiles, executions and transfers of the whole `train()`.
        steps: the same of each optimizer step, without logging.
    """

    trainer: Any
    counts: StepCounters = field(default_factory=StepCounters)
    steps: list[StepCounters] = field(default_factory=list)

    def logged(self, name: str) -> list[float]:
        """The values logged under a name, in order."""
        return [entry[name] for entry in self.trainer.state.log_history if name in entry]

    @property
    def losses(self) -> list[float]:
        return self.logged("loss")

    def parameters(self) -> dict[str, torch.Tensor]:
        """Copies of the parameters on the host."""
        return {name: value.detach().cpu() for name, value in self.trainer.model.state_dict().items()}

    def assert_one_graph(self, steps: int, *, graphs: int = 1, executions_per_step: int = 1) -> None:
        """Asserts one compile in all, one execution per step, nothing eager, reads only in verifying steps."""
        assert len(self.steps) == steps
        assert self.counts.compiles == graphs, self.explain()
        assert [step.executions for step in self.steps] == [executions_per_step] * steps, self.explain()
        assert all(step.eager_ops == 0 for step in self.steps), self.explain()
        verified = steps_of(self.trainer).train.verified
        reads = [step.transfers_to_host for step in self.steps]
        assert sorted(reads) == [0] * (steps - verified) + [1] * verified, self.explain()

    def explain(self) -> str:
        """The counts and the reason of every compile, for a failing test."""
        program = steps_of(self.trainer).train
        lines = [f"in all: {self.counts}"]
        lines += [f"step {index}: {step}" for index, step in enumerate(self.steps)]
        return "\n".join(lines + [f"compile: {event}" for event in program.events])


def steps_of(trainer: Any) -> StepDriver:
    """The compiled steps of one of our trainers: of training, of evaluation and of generation."""
    steps: StepDriver = trainer._xla.steps
    return steps


def arguments(folder: str | None = None, **options: Any) -> TrainingArguments:
    """Training arguments of a short quiet run that logs every step."""
    defaults: dict[str, Any] = {
        "output_dir": folder or tempfile.mkdtemp(),
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "max_steps": 4,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    if not hasattr(TrainingArguments, "activation_checkpointing"):
        # So it is called in transformers 5.22.
        options = {re.sub("^activation_", "gradient_", name): value for name, value in options.items()}
    return TrainingArguments(**{**defaults, **options})


def train(trainer: Any, **options: Any) -> Run:
    """Trains and counts. Options are those of `Trainer.train`."""
    counting = CountEachStep()
    trainer.add_callback(counting)
    with xla_adapters.count() as counts:
        trainer.train(**options)
    return Run(trainer, counts, counting.steps)


def ours(
    model: nn.Module,
    data: Any,
    *,
    args: TrainingArguments | None = None,
    trainer_class: Callable[..., Any] = hf_trainer.Trainer,
    train_options: dict[str, Any] | None = None,
    **options: Any,
) -> Run:
    """A run of our trainer. Options are those of the trainer."""
    get_runtime().device.initialize()
    trainer = trainer_class(model=model, args=args or arguments(), train_dataset=data, **options)
    return train(trainer, **(train_options or {}))


@contextmanager
def on_cpu(
    model: nn.Module,
    data: Any,
    *,
    args: dict[str, Any] | None = None,
    trainer_class: Callable[..., transformers.Trainer] = transformers.Trainer,
    **options: Any,
) -> Iterator[transformers.Trainer]:
    """Stock `transformers.Trainer`, or a class derived from it, on plain CPU torch."""
    with without_xla():
        # Nothing here may use XLA.
        trainer = trainer_class(
            model=model, args=arguments(use_cpu=True, **(args or {})), train_dataset=data, **options
        )
        assert trainer.args.device.type == "cpu"
        assert all(parameter.device.type == "cpu" for parameter in model.parameters())
        yield trainer
        if ON_TORCH_TPU:
            # So that the next trainer has another device.
            AcceleratorState._reset_state(reset_partial_state=True)


def reference(model: nn.Module, data: Any, *, args: dict[str, Any] | None = None, **options: Any) -> Run:
    """The same run on plain CPU torch, to compare with."""
    with on_cpu(model, data, args=args, **options) as trainer:
        trainer.train()
    return Run(trainer)


def assert_close(actual: list[float], expected: list[float], tolerance: float = TOLERANCE) -> None:
    """Compares losses (or other logged values) one by one."""
    assert len(actual) == len(expected) > 0, f"{actual} and {expected} differ in length"
    worst = max(abs(one - other) for one, other in zip(actual, expected, strict=True))
    assert worst <= tolerance, f"differ by {worst}, more than {tolerance}:\n  {actual}\n  {expected}"


def assert_parity(
    make_model: Callable[[], nn.Module],
    data: Any,
    *,
    tolerance: float = TOLERANCE,
    args: dict[str, Any] | None = None,
    xla: dict[str, Any] | None = None,
    **options: Any,
) -> Run:
    """Trains on CPU and on XLA from the same start and compares the logged losses.

    Args:
        make_model: makes the model, the same at each call.
        data: the training data.
        tolerance: on each loss.
        args: options of `TrainingArguments`, for both.
        xla: options of our trainer alone.
        **options: options of the trainer, for both.

    Returns:
        Our run.
    """
    expected = reference(make_model(), data, args=args, **options)
    actual = ours(make_model(), data, args=arguments(**(args or {})), **{**options, **(xla or {})})
    assert_close(actual.losses, expected.losses, tolerance)
    return actual


def traced_and_replayed(
    replays: int,
    *,
    recordings: int = 1,
    make: Any = gpt2,
    data: Any = None,
    args: dict[str, Any],
    replay: bool | str = "auto",
    **options: Any,
) -> Run:
    """Trains twice, traced and replayed, and asserts that both agree in losses, norms, parameters and optimizer state.

    Args:
        replays: how many steps may be replayed; some of them are traced, to verify the others.
        recordings: how many traced calls the steps alternate between; each is verified on its own.
        make: makes the model, the same at each call.
        data: the training data.
        args: options of `TrainingArguments`.
        replay: the `step_replay` of the second training.
        **options: options of the trainer.

    Returns:
        The second training.
    """
    data = data if data is not None else token_samples(32)
    traced = ours(make(), data, args=arguments(**args), step_replay=False, **options)
    replayed = ours(make(), data, args=arguments(**args), **{"step_replay": replay, **options})
    program = steps_of(replayed.trainer).train
    assert steps_of(traced.trainer).train.replays == 0
    assert program.replays == recordings * unverified(replays // recordings), program.replay_reasons
    for name in ("loss", "grad_norm", "learning_rate"):
        assert traced.logged(name) == replayed.logged(name)
    before, after = traced.parameters(), replayed.parameters()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert differences(_optimizer_state(traced), _optimizer_state(replayed)) == []
    return replayed


def unverified(steps: int) -> int:
    """How many of `steps` replayable steps are replayed; the others are traced to verify them."""
    replayed = verified = 0
    for _ in range(steps):
        if replayed in FIRST and replayed > verified:
            verified = replayed
        else:
            replayed += 1
    return replayed


def _optimizer_state(run: Run) -> dict[str, Any]:
    groups = run.trainer.optimizer.state_dict()["state"]
    return {
        f"{index} {name}": torch.as_tensor(value).cpu()
        for index, state in groups.items()
        for name, value in state.items()
    }


class Scores(hf_trainer.Trainer):
    """Returns fixed metrics from `evaluate`: the best step is 2, then 8."""

    scores: Any = (5, 1, 4, 3, 2)

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        metrics = {"eval_loss": float(self.scores[self.state.global_step // 2])}
        self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics


def keeping_the_best(limit: int | None) -> dict[str, Any]:
    """Options of a run that loads its best step at the end and keeps `limit` checkpoints."""
    return {
        "save_total_limit": limit,
        "load_best_model_at_end": True,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "eval_dataset": vector_samples(4),
        "trainer_class": Scores,
    }
