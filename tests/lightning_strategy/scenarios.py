"""Shared by the tests of the Lightning strategies: small modules, and runs on XLA and on the plain CPU to compare."""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import xla_adapters
from lightning_strategy import XLAEagerStrategy

FEATURES, CLASSES, BATCH = 8, 4, 8
# For Lightning itself to read anything. Lightning 2.5 does, and has no such argument.
ANYTHING = {"weights_only": False} if "weights_only" in inspect.signature(L.Trainer.fit).parameters else {}
TOLERANCE = 2e-6


def loader(batches: int = 6, *, seed: int = 0, rows: int | None = None, **options: Any) -> DataLoader[Any]:
    """A loader of random rows of `FEATURES` numbers with a class each, which depend only on the seed."""
    generator = torch.Generator().manual_seed(seed)
    rows = batches * BATCH if rows is None else rows
    inputs = torch.randn(rows, FEATURES, generator=generator)
    classes = torch.randint(0, CLASSES, (rows,), generator=generator)
    return DataLoader(TensorDataset(inputs, classes), **{"batch_size": BATCH, **options})


class Classifier(L.LightningModule):
    """A small network with batch norm, which keeps the loss of every training batch.

    There is no bias before the norm: its gradient would be rounding error only, which AdamW scales up.

    Args:
        dropout: the rate; must be 0 for a comparison with the CPU.
        optimizer: makes the optimizer, given the parameters.
    """

    def __init__(
        self, *, dropout: float = 0.0, optimizer: Callable[[Any], Any] = lambda p: torch.optim.AdamW(p, lr=1e-2)
    ) -> None:
        super().__init__()
        drop: list[nn.Module] = [nn.Dropout(dropout)] if dropout else []
        self.net = nn.Sequential(
            nn.Linear(FEATURES, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), *drop, nn.Linear(16, CLASSES)
        )
        self.make_optimizer = optimizer
        self.kept: list[torch.Tensor] = []

    def loss(self, batch: Any) -> torch.Tensor:
        inputs, classes = batch
        return nn.functional.cross_entropy(self.net(inputs), classes)

    def training_step(self, batch: Any, batch_idx: int) -> STEP_OUTPUT:
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if isinstance(outputs, dict) and "loss" in outputs:
            self.kept.append(outputs["loss"].detach())

    def validation_step(self, batch: Any, batch_idx: int) -> STEP_OUTPUT:
        self.log("val_loss", self.loss(batch))
        return None

    def configure_optimizers(self) -> Any:
        return self.make_optimizer(self.parameters())

    @property
    def losses(self) -> list[float]:
        return [float(loss) for loss in self.kept]


class WithoutBatchNorm(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.net[1] = nn.Identity()


@dataclass
class Outcome:
    """The result of a run.

    Attributes:
        module, trainer: as they are after the run.
        counters: of the whole `fit`, with setup and teardown.
        compiles: lines of the log that announce a compile, but for the first one of a step.
    """

    module: Any
    trainer: Any
    counters: xla_adapters.StepCounters = field(default_factory=xla_adapters.StepCounters)
    compiles: list[str] = field(default_factory=list)


def trainer(strategy: Any = None, **options: Any) -> Any:
    """A Trainer without progress bar and logs; on the plain CPU if no strategy is given."""
    quiet = {
        "logger": False,
        "enable_checkpointing": any(isinstance(callback, Checkpoint) for callback in options.get("callbacks", [])),
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "max_epochs": 2,
        "num_sanity_val_steps": 0,
    }
    if strategy is None:
        quiet["accelerator"] = "cpu"
    else:
        quiet["strategy"] = strategy
    return L.Trainer(**{**quiet, **options})


def fit(
    make: Callable[[], Any],
    strategy: Any = None,
    *,
    data: Callable[[], Any] = loader,
    validation: Callable[[], Any] | None = None,
    callbacks: Callable[[], list[Any]] = list,
    **options: Any,
) -> Outcome:
    """Fits a new module from a fixed seed.

    Args:
        make: the module.
        strategy: an `XLAEagerStrategy`; None for the plain CPU.
        data, validation: make the loaders.
        callbacks: makes the callbacks.
        options: of the Trainer.
    """
    xla_adapters.initialize(eager=False)
    L.seed_everything(7, verbose=False)
    module = make()
    run = trainer(strategy, callbacks=callbacks(), **options)
    announced = _Announcements()
    log = logging.getLogger("xla_adapters")
    log.addHandler(announced)
    try:
        with xla_adapters.count() as counters:
            run.fit(module, data(), None if validation is None else validation())
    finally:
        log.removeHandler(announced)
    return Outcome(module, run, counters, announced.lines)


def fit_both(make: Callable[[], Any], *, config: Any = None, **options: Any) -> tuple[Outcome, Outcome]:
    """The same fit on XLA and on the plain CPU; the losses must agree within `TOLERANCE`."""
    ours = fit(make, XLAEagerStrategy(config), **options)
    plain = fit(make, None, **options)
    assert_close(ours.module.losses, plain.module.losses)
    return ours, plain


def assert_close(ours: list[float], plain: list[float], tolerance: float = TOLERANCE) -> None:
    """Both have the same number of values, at least one, and none differ by more than `tolerance`."""
    assert len(ours) == len(plain) > 0, (ours, plain)
    differences = [abs(one - other) for one, other in zip(ours, plain, strict=True)]
    assert max(differences) <= tolerance, f"differ by {max(differences):.2e}: {ours} and {plain}"


class _Announcements(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@contextmanager
def warnings_as_list() -> Iterator[list[str]]:
    """The texts of all warnings in the body; a repeated warning counts each time."""
    found: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield found
    found.extend(str(warning.message) for warning in caught)
