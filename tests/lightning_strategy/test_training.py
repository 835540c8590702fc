"""Automatic optimization: the number of graphs and executions, and the losses of the plain CPU."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import lightning as L
import pytest
import torch
import transformers
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.utilities import grad_norm
from torch import nn

from lightning_strategy import XLAEagerStrategy
from tests.lightning_strategy.scenarios import (
    CLASSES,
    FEATURES,
    Classifier,
    Outcome,
    assert_close,
    fit,
    fit_both,
    loader,
)
from xla_adapters import TensorReadError, XLAConfig, get_runtime

pytestmark = pytest.mark.isolated


def assert_steps(run: Outcome, batches: int, *, graphs: int = 1, loaders: int = 1) -> None:
    """Each batch was one execution, of one of `graphs` graphs, and nothing else was executed per batch."""
    counters = run.counters
    assert (counters.compiles, counters.executions) == (graphs, batches), (counters, run.compiles)
    # Lightning compares the length of each loader on the device, once.
    assert counters.eager_ops <= 6 * loaders, counters


def assert_weights_close(ours: Outcome, plain: Outcome, tolerance: float = 2e-6) -> None:
    for mine, theirs in zip(ours.module.parameters(), plain.module.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, atol=tolerance, rtol=0)


class SeesMode(Classifier):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        assert get_runtime().tracing.eager()


def test_the_process_is_eager_once_there_is_a_strategy_and_during_runs() -> None:
    get_runtime().device.initialize()
    assert not get_runtime().tracing.eager()
    strategy = XLAEagerStrategy()
    assert get_runtime().tracing.eager()
    get_runtime().tracing.set_eager(False)
    fit(SeesMode, strategy, max_epochs=1)
    assert not get_runtime().tracing.eager()


def test_automatic_optimization_is_one_graph() -> None:
    ours, plain = fit_both(Classifier)
    assert_steps(ours, 12)
    assert ours.compiles == []
    assert_weights_close(ours, plain, 1e-5)
    # The second epoch has the same batches.
    assert sum(ours.module.losses[6:]) < sum(ours.module.losses[:6])


# Graphs: the first batch of an accumulation (no gradients yet), later ones (with gradients), and the update.
@pytest.mark.parametrize(("every", "graphs"), [(2, 2), (4, 3), (8, 3)])
def test_accumulation_is_a_graph_per_phase(every: int, graphs: int) -> None:
    ours, plain = fit_both(Classifier, accumulate_grad_batches=every)
    assert_steps(ours, 12, graphs=graphs)
    assert ours.trainer.global_step == plain.trainer.global_step
    assert_weights_close(ours, plain, 1e-5)


def test_accumulation_scheduled_by_epoch() -> None:
    ours, plain = fit_both(Classifier, callbacks=lambda: [GradientAccumulationScheduler({0: 1, 1: 3})], max_epochs=3)
    # Graphs: a batch with an update; then the first batch of an accumulation, a later one, and one with the update.
    assert_steps(ours, 18, graphs=4)
    assert ours.trainer.global_step == plain.trainer.global_step == 6 + 2 + 2


@pytest.mark.parametrize("every", [2, 4])
def test_accumulation_unrolled_is_one_graph_per_update(every: int) -> None:
    ours, plain = fit_both(Classifier, accumulate_grad_batches=every, config=XLAConfig(accumulation="unrolled"))
    updates = plain.trainer.global_step
    assert_steps(ours, updates, graphs=1 if every == 2 else 2)
    assert_weights_close(ours, plain, 1e-5)


def test_validation_in_mid_accumulation_ends_an_unrolled_step() -> None:
    ours, plain = fit_both(
        Classifier,
        accumulate_grad_batches=3,
        config=XLAConfig(accumulation="unrolled"),
        validation=lambda: loader(1, seed=1),
        val_check_interval=2,
    )
    assert_weights_close(ours, plain, 1e-5)
    # Accumulations of 3 with a validation after every 2 batches: steps of 2, 1, 1 and 2 batches, and the validation.
    assert (ours.counters.compiles, ours.counters.executions) == (4 + 1, 2 * (4 + 3)), ours.compiles
    assert len(ours.compiles) == 3


class ReadsLosses(Classifier):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.kept.append(torch.tensor(outputs["loss"].item()))


def test_losses_read_behind_each_batch_cost_a_transfer_and_nothing_else() -> None:
    ours, _ = fit_both(ReadsLosses)
    assert_steps(ours, 12)
    kept, _ = fit_both(Classifier)
    assert ours.counters.transfers_to_host == kept.counters.transfers_to_host + 12


def test_losses_cannot_be_read_within_an_unrolled_accumulation() -> None:
    with pytest.raises(TensorReadError, match="on_train_batch_end"):
        fit(ReadsLosses, XLAEagerStrategy(accumulation="unrolled"), accumulate_grad_batches=2)


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_clipping_is_part_of_the_graph(algorithm: str) -> None:
    options = {"gradient_clip_val": 0.02, "gradient_clip_algorithm": algorithm}

    def make() -> Classifier:
        return Classifier(optimizer=lambda p: torch.optim.SGD(p, lr=0.5))

    ours, plain = fit_both(make, **options)
    assert_steps(ours, 12)
    assert_weights_close(ours, plain)
    unclipped, _ = fit_both(make)
    assert abs(unclipped.module.losses[-1] - ours.module.losses[-1]) > 1e-3


class ClipsItself(Classifier):
    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")
        for parameter in self.parameters():
            parameter.grad = parameter.grad * 0.5


def test_configure_gradient_clipping_of_the_user() -> None:
    ours, _ = fit_both(ClipsItself)
    assert_steps(ours, 12)


class WarmsUp(Classifier):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        scale = min(1.0, self.trainer.global_step / 4)
        for group in optimizer.param_groups:
            # From exactly 0 to exactly 1: values that torch_xla makes constants of the graph.
            group["lr"] = scale
        optimizer.step(closure=optimizer_closure)
        self.seen = [*getattr(self, "seen", []), optimizer.param_groups[0]["lr"]]


def test_optimizer_step_of_the_user_warms_the_learning_rate_up() -> None:
    ours, plain = fit_both(lambda: WarmsUp(optimizer=lambda p: torch.optim.SGD(p, lr=0.1)))
    assert_steps(ours, 12)
    assert ours.module.seen == plain.module.seen == [0.0, 0.25, 0.5, 0.75] + [1.0] * 8


class StepsEverySecond(Classifier):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        if batch_idx % 2 == 0:
            optimizer.step(closure=optimizer_closure)
        else:
            optimizer_closure()


def test_optimizer_step_of_the_user_that_only_calls_the_closure() -> None:
    ours, plain = fit_both(StepsEverySecond)
    assert_steps(ours, 12, graphs=2)
    assert_weights_close(ours, plain, 1e-5)


class SkipsSome(Classifier):
    """Returns None for some batches, by their index."""

    skipped: tuple[int, ...] = (1, 3)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx in self.skipped else super().training_step(batch, batch_idx)


def test_training_step_returns_none_sometimes() -> None:
    # A batch without a loss has no graph.
    ours, plain = fit_both(SkipsSome, config=XLAConfig(max_graphs=1))
    # It is not executed.
    assert (ours.counters.compiles, ours.counters.executions) == (1, 8), ours.counters
    assert len(ours.module.losses) == 8
    assert_weights_close(ours, plain, 1e-5)


@pytest.mark.parametrize(
    ("accumulation", "skipped", "counts"),
    [
        ("per_micro_batch", (0, 3), (2, 8)),
        # Graphs: the first batch, a later one, one with the update, and an update without a batch.
        ("per_micro_batch", (1, 2), (4, 10)),
        ("unrolled", (0, 3), (1, 4)),
        ("unrolled", (1, 2), (2, 4)),
    ],
)
def test_training_step_returns_none_in_an_accumulation(
    accumulation: Any, skipped: tuple[int, ...], counts: tuple[int, int]
) -> None:
    def make() -> SkipsSome:
        module = SkipsSome()
        module.skipped = skipped
        return module

    ours, plain = fit_both(make, accumulate_grad_batches=3, config=XLAConfig(accumulation=accumulation))
    assert len(ours.module.losses) == 8
    assert_weights_close(ours, plain, 1e-5)
    assert (ours.counters.compiles, ours.counters.executions) == counts, ours.compiles


class ReturnsDict(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return {"loss": loss, "batch": batch_idx, "predicted": self.net(batch[0]).argmax(-1), "nested": {"n": [loss]}}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        assert outputs["batch"] == batch_idx
        self.kept.append(outputs["predicted"].float().mean())


def test_training_step_returns_a_dict() -> None:
    ours, _ = fit_both(ReturnsDict)
    assert ours.counters.compiles == 1
    assert ours.counters.executions == 12
    assert len(ours.module.losses) == 24


class LogsGradients(Classifier):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log_dict(grad_norm(self.net, norm_type=2))


def test_gradient_norms_are_logged_from_inside_the_step() -> None:
    ours, plain = fit_both(LogsGradients)
    assert_steps(ours, 12)
    mine, theirs = (
        {name: float(value) for name, value in run.trainer.callback_metrics.items() if "grad" in name}
        for run in (ours, plain)
    )
    assert mine.keys() == theirs.keys()
    assert_close(list(mine.values()), list(theirs.values()), 1e-5)
    assert mine["grad_2.0_norm_total"] > 0.01


class SeesGradients(Classifier):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.kept.append(self.net[-1].weight.grad.abs().sum())


def test_gradients_stay_for_a_user_who_looks_at_them_behind_the_update() -> None:
    ours, _ = fit_both(SeesGradients)
    assert ours.counters.compiles == 1
    assert ours.counters.executions == 12


class SeesSomeGradients(Classifier):
    """Reads gradients after every third batch."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx % 3 == 2:
            self.kept += [parameter.grad.abs().sum() for parameter in self.parameters()]


def test_gradients_are_there_for_a_user_who_looks_now_and_then() -> None:
    ours, plain = fit_both(SeesSomeGradients)
    assert ours.counters.compiles == 1
    assert ours.counters.executions >= 12
    kept = [[float(value) for value in outcome.module.kept] for outcome in (ours, plain)]
    assert_close(*kept, 1e-5)


class KeepsLossesInStep(Classifier):
    """Has no hook after the update."""

    on_train_batch_end = LightningModule.on_train_batch_end  # type: ignore[assignment]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.kept.append(loss.detach())
        return loss


@pytest.mark.parametrize(("free_grads", "left"), [("auto", False), (True, False), (False, True)])
def test_gradients_are_freed_where_nobody_sees_them(free_grads: Any, left: bool) -> None:
    ours, _ = fit_both(KeepsLossesInStep, config=XLAConfig(free_grads=free_grads))
    assert_steps(ours, 12)
    grads = [parameter.grad is not None for parameter in ours.module.parameters()]
    assert set(grads) == {left}


def test_gradients_are_there_for_a_hook_that_is_set_on_a_callback() -> None:
    seen: list[float] = []

    def see(trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        seen.append(float(sum(parameter.grad.abs().sum() for parameter in module.parameters())))

    def hooked() -> list[Any]:
        callback = L.Callback()
        callback.on_train_batch_end = see  # type: ignore[method-assign]
        return [callback, Mock(spec=L.Callback)]

    ours, _ = fit_both(KeepsLossesInStep, callbacks=hooked)
    assert ours.counters.compiles == 1
    assert_close(seen[:12], seen[12:], 1e-5)


def test_gradients_are_freed_behind_the_update_and_not_within_an_accumulation() -> None:
    ours, plain = fit_both(KeepsLossesInStep, config=XLAConfig(free_grads=True), accumulate_grad_batches=2)
    assert_steps(ours, 12, graphs=2)
    assert_weights_close(ours, plain, 1e-5)


class ZeroesInPlace(KeepsLossesInStep):
    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)


@pytest.mark.parametrize(("free_grads", "graphs"), [("auto", 1), (False, 2)])
def test_gradients_zeroed_in_place_by_the_user(free_grads: Any, graphs: int) -> None:
    """Gradients that are not freed are inputs of each batch's graph but the first."""
    ours, plain = fit_both(ZeroesInPlace, config=XLAConfig(free_grads=free_grads))
    assert_steps(ours, 12, graphs=graphs)
    assert_weights_close(ours, plain, 1e-5)


class Recurrent(Classifier):
    """Passes a hidden state from batch to batch."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(FEATURES, FEATURES)
        self.hidden: torch.Tensor | None = None

    def on_train_epoch_start(self) -> None:
        self.hidden = torch.zeros(8, FEATURES, device=self.device)

    def loss(self, batch: Any) -> torch.Tensor:
        hidden = self.cell(batch[0], self.hidden)
        self.hidden = hidden.detach()
        return super().loss([hidden, batch[1]])


def test_state_handed_from_batch_to_batch() -> None:
    ours, plain = fit_both(Recurrent)
    assert (ours.counters.compiles, ours.counters.executions) == (1, 12)
    assert_weights_close(ours, plain, 1e-5)


class Tied(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(CLASSES, 16)
        self.head = nn.Linear(16, CLASSES, bias=False)
        self.head.weight = self.embed.weight
        self.body = nn.Linear(FEATURES, 16)

    def loss(self, batch: Any) -> torch.Tensor:
        inputs, classes = batch
        hidden = torch.tanh(self.body(inputs) + self.embed(classes.flip(0)))
        return nn.functional.cross_entropy(self.head(hidden), classes) + super().loss(batch)


def test_tied_weights_stay_tied() -> None:
    ours, plain = fit_both(Tied)
    assert_steps(ours, 12)
    assert ours.module.head.weight is ours.module.embed.weight
    assert_weights_close(ours, plain, 1e-5)


class LanguageModel(L.LightningModule):
    """A GPT-2 of transformers."""

    def __init__(self) -> None:
        super().__init__()
        config = transformers.GPT2Config(
            vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
        )
        self.model = transformers.GPT2LMHeadModel(config)
        self.kept: list[torch.Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.model(**batch).loss
        self.kept.append(loss.detach())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.model(**batch).loss)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    @property
    def losses(self) -> list[float]:
        return [float(loss) for loss in self.kept]


def token_loader() -> Any:
    generator = torch.Generator().manual_seed(0)
    rows = []
    for index in range(16):
        tokens = torch.randint(0, 32, (12,), generator=generator)
        mask = (torch.arange(12) < 12 - index % 4).long()
        rows.append({"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)})
    return torch.utils.data.DataLoader(rows, batch_size=4)


def test_language_model_of_huggingface_with_an_attention_mask() -> None:
    ours, plain = fit_both(LanguageModel, data=token_loader, validation=token_loader)
    # Graphs: training and validation.
    assert_steps(ours, 8 + 8, graphs=2, loaders=2)
    assert ours.module.model.lm_head.weight is ours.module.model.transformer.wte.weight
    mine, theirs = (float(run.trainer.callback_metrics["val_loss"]) for run in (ours, plain))
    assert abs(mine - theirs) < 2e-6
