"""Runs a program of the corpus once, with one thing changed on the way; and compares two runs."""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import tempfile
import types
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import torch
from transformers import TrainerCallback, TrainingArguments

import hf_trainer
import xla_adapters
from lightning_strategy import XLAEagerStrategy
from tests.replay.reachable import ambient
from tests.replay.reachable.program import Built, LightningRun, Loop, Program, TrainerRun
from tests.replay.reachable.walker import Leaf, Walker
from tests.support import state_of
from xla_adapters import CompiledStep, StepSeed, XLAConfig
from xla_adapters.errors import XLAAdapterError

# Long enough to be replayed when the change comes, and again behind it.
BEFORE, AFTER = 7, 4
# What a change may well break.
_ERRORS = (
    ArithmeticError, AssertionError, AttributeError, LookupError, NameError, RuntimeError, TypeError, ValueError,
    XLAAdapterError,
)  # fmt: skip
# Options of the HF Trainer that a callback may set.
_ARGS = ("max_grad_norm",)
Intervention = Callable[[list[Leaf]], "Callable[[], object] | object"]


@dataclass
class Outcome:
    """What a run came to.

    Attributes:
        steps: what each step gave, by name, on the host.
        final: parameters, buffers and the state of optimizers, on the host.
        replays: steps that were replayed; of the trainers only if that was asked for.
        reasons: as of `CompiledStep`.
        error: what the run ended with, or None.
    """

    steps: list[dict[str, Any]] = field(default_factory=list)
    final: dict[str, Any] = field(default_factory=dict)
    replays: int = 0
    reasons: dict[str, int] = field(default_factory=dict)
    error: str | None = None

    def difference(self, other: Outcome) -> str | None:
        """How another run's numbers differ, the first step that does first; None if they are the same bits."""
        if other.error is not None or self.error is not None:
            return f"one ended with {self.error!r}, the other with {other.error!r}"
        for number, (mine, theirs) in enumerate(zip(self.steps, other.steps, strict=True)):
            names = _differing(mine, theirs)
            if names:
                losses = [name for name in mine if name.startswith("loss") and name != names[0]][:1]
                said = [f"{name} is {_said(mine, theirs, name)}" for name in names[:1] + losses]
                return f"step {number}: {'; '.join(said)}"
        names = _differing(self.final, other.final)
        if names:
            return f"at the end: {', '.join(names)}; {names[0]} is {_said(self.final, other.final, names[0])}"
        return None


def _said(mine: Mapping[str, Any], theirs: Mapping[str, Any], name: str) -> str:
    one, other = mine.get(name, "absent"), theirs.get(name, "absent")
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and one.shape == other.shape:
        # From the first number that is another one.
        first = next(iter((one != other).flatten().nonzero().flatten().tolist()), 0)
        one, other = (item.flatten()[first : first + 3].tolist() for item in (one, other))
    return f"{one}, replayed {other}"


def _differing(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    names = [name for name in {**mine, **theirs} if (name in mine) != (name in theirs)]
    return names + [name for name in mine if name in theirs and not _same(mine[name], theirs[name])]


def _same(mine: Any, theirs: Any) -> bool:
    if not isinstance(mine, torch.Tensor) or not isinstance(theirs, torch.Tensor):
        return type(mine) is type(theirs) and (bool(mine == theirs) or (mine != mine and theirs != theirs))
    if mine.dtype != theirs.dtype or mine.shape != theirs.shape:
        return False
    return torch.equal(mine, theirs) or (
        torch.equal(mine.isnan(), theirs.isnan()) and torch.equal(mine.nan_to_num(), theirs.nan_to_num())
    )


def run(
    program: Program, replay: bool | str, intervene: Intervention | None = None, *, counted: bool = False
) -> Outcome:
    """Builds a program and runs it.

    Args:
        program: which.
        replay: `step_replay`.
        intervene: given the leaves after `BEFORE` steps, it may change one; what it returns takes that back at last.
        counted: whether replays of the trainers are counted, too, which takes longer.
    """
    outcome = Outcome()
    with ambient.restored(), contextlib.ExitStack() as undo, _quiet():
        xla_adapters.initialize()
        built = program.build()
        if isinstance(built, Loop) and built.end is not None:
            undo.callback(built.end)
        torch.manual_seed(0)
        change = functools.partial(_change, built, intervene, undo)
        calls = undo.enter_context(_calls_of(_code_of(built))) if counted else []
        try:
            _RUNS[type(built)](built, replay, outcome, change)
        except _ERRORS as error:
            outcome.error = f"{type(error).__name__}: {error!s:.300}"
        else:
            # In no mode of the change's.
            undo.close()
            if counted and not isinstance(built, Loop):
                outcome.replays = BEFORE + AFTER - len(calls)
            outcome.final.update(_state(built))
    return outcome


def _code_of(built: Built) -> types.CodeType | None:
    """What runs once in each traced step of a trainer."""
    if isinstance(built, Loop):
        return None
    method = built.model.forward if isinstance(built, TrainerRun) else built.module.training_step
    code: types.CodeType = method.__code__
    return code


@contextlib.contextmanager
def _calls_of(code: types.CodeType | None) -> Iterator[list[None]]:
    """Counts calls without a change of the program: a wrapper would be one."""
    calls: list[None] = []

    def see(frame: types.FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code is code:
            calls.append(None)

    sys.setprofile(see if code is not None else None)
    try:
        yield calls
    finally:
        sys.setprofile(None)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    level = logging.getLogger("lightning.pytorch").level
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            logging.getLogger("lightning.pytorch").setLevel(level)


def _change(
    built: Built, intervene: Intervention | None, undo: contextlib.ExitStack, roots: Mapping[str, Any], **places: Any
) -> None:
    if intervene is None:
        return
    walker = Walker()
    for name, (value, put) in places.items():
        walker.visit(value, f"args.{name}", put, 1)
    taken_back = intervene(walker.walk({**roots, **built.roots}))
    if callable(taken_back):
        undo.callback(taken_back)


def _run_loop(built: Loop, replay: bool | str, outcome: Outcome, change: Callable[..., None]) -> None:
    numbers = iter(range(BEFORE + AFTER))
    current = 0
    step = CompiledStep(
        built.step,
        config=XLAConfig(step_replay=replay),  # type: ignore[arg-type]
        seed=lambda: StepSeed(seed=7, step=current),
        modules=built.modules,
    )
    for current in numbers:
        if current == BEFORE:
            roots = {"step": built.step, "model": built.model}
            roots |= {f"optimizer {index}": item for index, item in enumerate(built.optimizers)}
            roots |= {f"batch[{index}]": type(item) for index, item in enumerate(built.batch(0))}
            change(roots)
        outcome.steps.append(_on_host(step(*built.batch(current))))
        if built.after is not None:
            built.after(current)
    outcome.replays, outcome.reasons = step.replays, dict(step.reasons)


def _on_host(result: Any) -> dict[str, Any]:
    leaves = torch.utils._pytree.tree_leaves(result)
    return {f"loss {number}": _copied(leaf) for number, leaf in enumerate(leaves)}


def _copied(value: Any) -> Any:
    return value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value


def _state(built: Built) -> dict[str, Any]:
    if not isinstance(built, Loop):
        return {}
    state = state_of(built.model, *built.optimizers)
    # Whoever traces asks the host's generator for nothing either, but makes tensors.
    del state["host seed"]
    return state


class _Watching(TrainerCallback):
    """Notes the weights behind each step, and changes something behind one."""

    def __init__(self, outcome: Outcome, change: Callable[[Any], None]) -> None:
        self.outcome = outcome
        self.change = change

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.outcome.steps.append({name: _copied(item) for name, item in kwargs["model"].state_dict().items()})
        if state.global_step == BEFORE:
            self.change(kwargs)


def _run_trainer(built: TrainerRun, replay: bool | str, outcome: Outcome, change: Callable[..., None]) -> None:
    def changed(kwargs: Any) -> None:
        roots = {
            "model": built.model,
            "optimizer": getattr(trainer.optimizer, "optimizer", trainer.optimizer),
            "scheduler": trainer.lr_scheduler,
            **{f"callbacks[{number}]": item for number, item in enumerate(built.callbacks)},
            "trainer": trainer,
            "collator": built.options.get("data_collator"),
        }
        change(roots, **{name: (getattr(args, name), functools.partial(setattr, args, name)) for name in _ARGS})

    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            output_dir=folder,
            **{
                "per_device_train_batch_size": 4,
                "max_steps": BEFORE + AFTER,
                "learning_rate": 1e-2,
                "logging_steps": 1,
                "report_to": [],
                "save_strategy": "no",
                "disable_tqdm": True,
                "dataloader_pin_memory": False,
                "seed": 0,
                **built.args,
            },
        )
        trainer = (built.trainer_class or hf_trainer.Trainer)(
            model=built.model,
            args=args,
            train_dataset=built.data,
            callbacks=[*built.callbacks, _Watching(outcome, changed)],
            step_replay=replay,
            **built.options,
        )
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    outcome.steps = [{"loss": loss, **step} for step, loss in zip(outcome.steps, losses, strict=True)]
    outcome.final.update(_optimizer_state(getattr(trainer.optimizer, "optimizer", trainer.optimizer)))


def _optimizer_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {
        f"optimizer {number} {name}": _copied(item)
        for number, state in optimizer.state_dict()["state"].items()
        for name, item in state.items()
    }


class _WatchingLightning(L.Callback):
    """As `_Watching`."""

    def __init__(self, outcome: Outcome, change: Callable[[Any, Any], None]) -> None:
        self.outcome = outcome
        self.change = change

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        weights = {name: _copied(item) for name, item in module.state_dict().items()}
        loss = outputs["loss"] if isinstance(outputs, dict) else outputs
        self.outcome.steps.append({"loss": _copied(loss), **weights})
        if batch_idx == BEFORE - 1:
            self.change(trainer, module)


def _run_lightning(built: LightningRun, replay: bool | str, outcome: Outcome, change: Callable[..., None]) -> None:
    def changed(trainer: Any, module: Any) -> None:
        roots = {
            "module": module,
            "training_step": module.training_step,
            "optimizer": trainer.optimizers[0],
            **{f"callbacks[{number}]": item for number, item in enumerate(built.callbacks)},
            **{f"schedulers[{number}]": item.scheduler for number, item in enumerate(trainer.lr_scheduler_configs)},
        }
        change(roots)

    trainer = L.Trainer(
        strategy=XLAEagerStrategy(XLAConfig(step_replay=replay)),  # type: ignore[arg-type]
        max_epochs=1,
        limit_train_batches=BEFORE + AFTER,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[*built.callbacks, _WatchingLightning(outcome, changed)],
        **built.options,
    )
    trainer.fit(built.module, built.data)
    outcome.final.update(_optimizer_state(trainer.optimizers[0]))


_RUNS: Mapping[type, Callable[..., None]] = {
    Loop: _run_loop,
    TrainerRun: _run_trainer,
    LightningRun: _run_lightning,
}
