"""Optimizers and learning-rate schedules, and manual optimization."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR, ReduceLROnPlateau, StepLR

from tests.lightning_strategy.scenarios import (
    FEATURES,
    Classifier,
    assert_close,
    fit_both,
    loader,
    warnings_as_list,
)
from xla_adapters import EagerOptimizerWarning

pytestmark = pytest.mark.isolated

_OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "SGD dampening": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5),
    "Adam amsgrad": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True),
    "AdamW foreach off": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=False),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05, lr_decay=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-2),
    "RMSprop centered": lambda p: torch.optim.RMSprop(p, lr=1e-2, momentum=0.9, centered=True),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=1e-2),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=1.0),
}
# The first step sets the momentum to the gradient, without dampening: another graph than that of later steps.
_MORE_GRAPHS = {"SGD dampening": 2}


class NoBatchNorm(Classifier):
    """All its gradients are well above rounding error, which some optimizers scale up."""

    def __init__(self, optimizer: Callable[[Any], Any]) -> None:
        super().__init__(optimizer=optimizer)
        self.net[1] = nn.Identity()


@pytest.mark.parametrize("name", sorted(_OPTIMIZERS))
def test_optimizer_is_part_of_the_graph(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", EagerOptimizerWarning)
        ours, _ = fit_both(lambda: NoBatchNorm(_OPTIMIZERS[name]))
    assert ours.counters.compiles == _MORE_GRAPHS.get(name, 1), ours.compiles
    assert ours.counters.executions == 12


def test_lbfgs_runs_eagerly_and_says_so_once() -> None:
    def make() -> Classifier:
        return NoBatchNorm(lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=2))

    with warnings_as_list() as found:
        ours, plain = fit_both(make, data=lambda: loader(2))
    assert len([text for text in found if "LBFGS runs eagerly" in text]) == 1, found
    assert len(ours.module.losses) == 4
    for mine, theirs in zip(ours.module.parameters(), plain.module.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=0)


class Scheduled(Classifier):
    """Keeps the learning rate of every batch.

    Args:
        schedule: makes the scheduler configuration from the optimizer.
    """

    def __init__(self, schedule: Callable[[Any], Any], **options: Any) -> None:
        super().__init__(**options)
        self.schedule = schedule
        self.rates: list[float] = []

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return {"optimizer": optimizer, "lr_scheduler": self.schedule(optimizer)}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])
        return super().training_step(batch, batch_idx)


_SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "per step": lambda o: {"scheduler": CosineAnnealingLR(o, 12), "interval": "step"},
    "per step, from 0 to 1": lambda o: {"scheduler": LambdaLR(o, lambda n: min(n / 3, 1)), "interval": "step"},
    "one cycle": lambda o: {"scheduler": OneCycleLR(o, max_lr=0.1, total_steps=13), "interval": "step"},
    "every second step": lambda o: {"scheduler": StepLR(o, 1, 0.5), "interval": "step", "frequency": 2},
    "per epoch": lambda o: StepLR(o, 1, 0.1),
}


@pytest.mark.parametrize("name", sorted(_SCHEDULES))
def test_schedules_do_not_change_the_graph(name: str) -> None:
    ours, plain = fit_both(lambda: Scheduled(_SCHEDULES[name], optimizer=lambda p: torch.optim.SGD(p, lr=1.0)))
    assert (ours.counters.compiles, ours.counters.executions) == (1, 12), ours.compiles
    assert ours.module.rates == plain.module.rates
    assert len(set(ours.module.rates)) > 1


@pytest.mark.parametrize("monitor", ["val_loss", "loss"])
def test_plateau_schedule_follows_what_was_logged(monitor: str) -> None:
    def schedule(optimizer: Any) -> Any:
        return {
            "scheduler": ReduceLROnPlateau(optimizer, patience=0, factor=0.1),
            "monitor": monitor,
            "interval": "epoch" if monitor == "val_loss" else "step",
        }

    def make() -> Scheduled:
        return Scheduled(schedule, optimizer=lambda p: torch.optim.SGD(p, lr=1.0))

    ours, plain = fit_both(make, validation=lambda: loader(2, seed=1), max_epochs=4)
    assert ours.counters.compiles == 2, ours.compiles
    assert ours.counters.executions == 4 * (6 + 2)
    assert ours.module.rates == pytest.approx(plain.module.rates)
    assert len(set(ours.module.rates)) > 1


class Gan(L.LightningModule):
    """Two optimizers in turn, as in Lightning's documentation."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, FEATURES))
        self.discriminator = nn.Sequential(nn.Linear(FEATURES, 16), nn.ReLU(), nn.Linear(16, 1))
        self.kept: list[torch.Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> None:
        real = batch[0]
        latent = real[:, :4] * 0.5
        ones, zeros = torch.ones(len(real), 1).type_as(real), torch.zeros(len(real), 1).type_as(real)
        for_generator, for_discriminator = self.optimizers()  # type: ignore[attr-defined]
        loss_of = nn.functional.binary_cross_entropy_with_logits

        self.toggle_optimizer(for_generator)
        generator_loss = loss_of(self.discriminator(self.generator(latent)), ones)
        self.log("generator", generator_loss, prog_bar=True)
        self.manual_backward(generator_loss)
        self.clip_gradients(for_generator, gradient_clip_val=0.1)
        for_generator.step()
        for_generator.zero_grad()
        self.untoggle_optimizer(for_generator)

        self.toggle_optimizer(for_discriminator)
        fake = self.generator(latent).detach()
        loss = (loss_of(self.discriminator(real), ones) + loss_of(self.discriminator(fake), zeros)) / 2
        self.log("discriminator", loss, prog_bar=True)
        self.manual_backward(loss)
        for_discriminator.step()
        for_discriminator.zero_grad()
        self.untoggle_optimizer(for_discriminator)
        self.kept += [generator_loss.detach(), loss.detach()]

    def configure_optimizers(self) -> Any:
        first = torch.optim.Adam(self.generator.parameters(), lr=1e-2, betas=(0.5, 0.999))
        second = torch.optim.Adam(self.discriminator.parameters(), lr=1e-2, betas=(0.5, 0.999))
        return [first, second], []

    @property
    def losses(self) -> list[float]:
        return [float(loss) for loss in self.kept]


def test_gan_with_toggled_optimizers_is_one_graph() -> None:
    ours, plain = fit_both(Gan)
    assert (ours.counters.compiles, ours.counters.executions) == (1, 12), ours.compiles
    assert len(ours.module.losses) == 24
    assert ours.trainer.global_step == plain.trainer.global_step == 24
    assert all(parameter.requires_grad for parameter in ours.module.parameters())


class Manual(Classifier):
    """Manual optimization with a scheduler, and an update after every second batch."""

    every = 2

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer, scheduler = self.optimizers(), self.lr_schedulers()
        loss = self.loss(batch)
        self.kept.append(loss.detach())
        self.manual_backward(loss / self.every)
        if (batch_idx + 1) % self.every == 0:
            optimizer.step()  # type: ignore[union-attr]
            optimizer.zero_grad()  # type: ignore[union-attr]
            scheduler.step()  # type: ignore[union-attr]

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [StepLR(optimizer, 1, 0.5)]


def test_manual_accumulation_is_a_graph_per_phase() -> None:
    ours, _ = fit_both(Manual)
    assert (ours.counters.compiles, ours.counters.executions) == (2, 12), ours.compiles


class ManualWithClosure(Manual):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()

        def closure() -> torch.Tensor:
            optimizer.zero_grad()  # type: ignore[union-attr]
            loss = self.loss(batch)
            self.kept.append(loss.detach())
            self.manual_backward(loss)
            return loss

        optimizer.step(closure=closure)  # type: ignore[union-attr]


def test_manual_optimization_with_a_closure_is_one_graph() -> None:
    ours, _ = fit_both(ManualWithClosure)
    assert (ours.counters.compiles, ours.counters.executions) == (1, 12), ours.compiles


class UpdatesPerEpoch(Manual):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.kept.append(loss.detach())
        self.manual_backward(loss)
        self.log("loss", loss)
        return {"loss": loss, "extra": batch_idx}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert outputs["extra"] == batch_idx

    def on_train_epoch_end(self) -> None:
        optimizer = self.optimizers()
        optimizer.step()  # type: ignore[union-attr]
        optimizer.zero_grad()  # type: ignore[union-attr]


def test_update_in_an_epoch_hook_is_a_step_of_its_own() -> None:
    ours, plain = fit_both(UpdatesPerEpoch, max_epochs=3)
    # Graphs: batches without gradients before them, batches with gradients before them, and the update.
    assert (ours.counters.compiles, ours.counters.executions) == (3, 18 + 3), ours.compiles
    assert_close(
        [float(p.abs().sum()) for p in ours.module.net[-1].parameters()],
        [float(p.abs().sum()) for p in plain.module.net[-1].parameters()],
        1e-5,
    )
