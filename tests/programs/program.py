"""`Program`: a training of the coverage table, and helpers to run it and collect its losses, weights and replays."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import lightning as L
import numpy as np
import torch
from lightning.pytorch.loggers import Logger
from torch import nn
from transformers import set_seed

from lightning_strategy import XLAEagerStrategy
from xla_adapters import CompiledStep, StepProgram, XLAConfig, initialize
from xla_adapters.config import StepReplay

Kind = Literal["HF", "Lightning", "own loop"]
SEED = 42
# Logged values that differ between any two runs.
_TIMINGS = ("runtime", "per_second")


@dataclass(kw_only=True)
class Ran:
    """The results of one run of a program, as plain values and numpy arrays.

    Attributes:
        steps: number of calls of the training step.
        replays: number of calls that were replayed.
        reasons: why other calls were traced, and how often.
        logged: the logged numbers in order, including all losses.
        weights: final parameters and buffers by name.
    """

    steps: int
    replays: int
    reasons: dict[str, int]
    logged: list[dict[str, float]]
    weights: dict[str, np.ndarray[Any, Any]] = field(repr=False)


@dataclass(frozen=True)
class Program:
    """One row of the table.

    Attributes:
        name: to select it by.
        kind: what runs the loop.
        run: trains once, in a child.
        calls: number of different calls of the step, each of which is captured separately: 2 with accumulation.
        stock: whether it is a model of transformers under the Trainer, without code of the user's in the step.
    """

    name: str
    kind: Kind
    run: Callable[[StepReplay], Ran]
    calls: int = 1
    stock: bool = False


# ---- HF Trainer --------------------------------------------------------------------------------------


def hf(name: str, make: Callable[..., Any], *, calls: int = 1, stock: bool = False) -> Program:
    """A program of the HF Trainer.

    Args:
        name: see `Program`.
        make: makes the trainer, given an output folder and `step_replay`.
        calls, stock: see `Program`.
    """
    return Program(name, "HF", functools.partial(_train, make), calls, stock)


def _train(make: Callable[..., Any], step_replay: StepReplay) -> Ran:
    initialize()
    set_seed(SEED)
    with tempfile.TemporaryDirectory() as folder:
        trainer = make(folder, step_replay=step_replay)
        trainer.train()
    logged = [
        {name: float(value) for name, value in entry.items() if not _is_time(name)}
        for entry in trainer.state.log_history
    ]
    return _ran(trainer._xla.steps.train, logged, [trainer.model])


def _is_time(name: str) -> bool:
    """Whether a logged value is a time, and so another one in each run."""
    return name.startswith("xla/") or name.endswith(_TIMINGS)


# ---- Lightning ---------------------------------------------------------------------------------------


class Logged(Logger):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.values: list[dict[str, float]] = []

    @property
    def name(self) -> str:
        return "logged"

    @property
    def version(self) -> int:
        return 0

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.values.append({name: float(value) for name, value in metrics.items() if not _is_time(name)})

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        """Does nothing: hyper-parameters are not compared."""


class KeepProgram(L.Callback):
    """Keeps the program of the training steps; the strategy drops it when the run ends."""

    program: StepProgram | None = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        strategy: Any = trainer.strategy
        self.program = strategy.run.steps.train


class Fit:
    """Fits a module as `L.Trainer(...).fit(module, ...)` does, with the strategy.

    Args:
        step_replay: of the strategy.
    """

    def __init__(self, step_replay: StepReplay) -> None:
        self._step_replay = step_replay
        self.ran: Ran | None = None

    def __call__(self, module: L.LightningModule, *data: Any, callbacks: Sequence[Any] = (), **options: Any) -> None:
        """Trains, and notes how.

        Args:
            module: what is trained.
            data: as for `fit`.
            callbacks, options: of the Trainer.
        """
        logger, kept = Logged(), KeepProgram()
        quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
        strategy = XLAEagerStrategy(step_replay=self._step_replay)
        with tempfile.TemporaryDirectory() as folder:
            trainer = L.Trainer(
                strategy=strategy,
                logger=logger,
                log_every_n_steps=1,
                default_root_dir=folder,
                callbacks=[kept, *callbacks],
                **{**quiet, **options},
            )
            trainer.fit(module, *data)
        assert kept.program is not None
        at_end = {name: float(value) for name, value in trainer.callback_metrics.items()}
        self.ran = _ran(kept.program, [*logger.values, at_end], [module])


def lightning(name: str, fit: Callable[[Fit], None], *, calls: int = 1) -> Program:
    """A program of Lightning's Trainer.

    Args:
        name: see `Program`.
        fit: trains with the `Fit` that it is given.
        calls: see `Program`.
    """
    return Program(name, "Lightning", functools.partial(_fit, fit), calls)


def _fit(fit: Callable[[Fit], None], step_replay: StepReplay) -> Ran:
    initialize()
    L.seed_everything(SEED, verbose=False)
    fitting = Fit(step_replay)
    fit(fitting)
    assert fitting.ran is not None
    return fitting.ran


# ---- own loops ---------------------------------------------------------------------------------------


@dataclass
class Trained:
    """The return value of a hand-written loop.

    Attributes:
        step: the compiled step.
        losses: the result of each call.
        modules: the trained modules.
    """

    step: CompiledStep[Any]
    losses: list[torch.Tensor]
    modules: Sequence[nn.Module]


def own_loop(name: str, train: Callable[[Callable[..., CompiledStep[Any]]], Trained], *, calls: int = 1) -> Program:
    """A program with a hand-written loop.

    Args:
        name: see `Program`.
        train: trains, given what makes a `CompiledStep` of a function.
        calls: see `Program`.
    """
    return Program(name, "own loop", functools.partial(_loop, train), calls)


def _loop(train: Callable[[Callable[..., CompiledStep[Any]]], Trained], step_replay: StepReplay) -> Ran:
    initialize()
    torch.manual_seed(SEED)
    trained = train(functools.partial(CompiledStep, config=XLAConfig(step_replay=step_replay)))
    logged = [{"loss": float(loss)} for loss in trained.losses]
    return _ran(trained.step.program, logged, trained.modules)


def _ran(program: StepProgram, logged: list[dict[str, float]], modules: Sequence[nn.Module]) -> Ran:
    weights = {
        f"{index}.{name}" if index else name: value.detach().cpu().numpy()
        for index, module in enumerate(modules)
        for name, value in (*module.named_parameters(), *module.named_buffers())
    }
    return Ran(
        steps=program.calls,
        replays=program.replays,
        reasons=program.replay_reasons,
        logged=logged,
        weights=weights,
    )
