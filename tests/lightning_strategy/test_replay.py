"""Replayed steps of Lightning's loops compute the same as traced ones, bit by bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
import torchmetrics
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import grad_norm
from torch import nn

import xla_adapters
from lightning_strategy import XLAEagerStrategy
from tests.isolation import isolated
from tests.lightning_strategy.scenarios import CLASSES, Classifier, Outcome, fit, loader
from xla_adapters import ConfigError, XLAConfig


class Programs(L.Callback):
    """Keeps the step programs of a run."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        steps = trainer.strategy.run.steps
        pl_module.programs = {"train": steps.train, **steps.evaluation}


class Logging(Classifier):
    """Logs in all ways, and has a learning-rate schedule per step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("both", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log_dict({"twice": loss * 2, "max": loss.detach()}, on_step=False, on_epoch=True, reduce_fx="max")
        return {"loss": loss, "half": loss.detach() / 2}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.kept += [outputs["loss"], outputs["half"]]

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def pair(
    make: Callable[[], Any],
    replays: dict[str, int],
    *,
    replay: bool | str = "auto",
    config: dict[str, Any] | None = None,
    callbacks: Callable[[], list[Any]] = list,
    **options: Any,
) -> Outcome:
    """The same fit traced and replayed; returns the replayed one.

    Args:
        make: the module.
        replays: the number of replayed calls, by program.
        replay: `step_replay` of the second one.
        config: further options of both.
        callbacks: makes the callbacks.
        **options: of `fit`.
    """
    runs = {}
    for choice in (False, replay):
        strategy = XLAEagerStrategy(XLAConfig(step_replay=choice, replay_verify_every=None, **(config or {})))  # type: ignore[arg-type]
        runs[choice] = fit(make, strategy, callbacks=lambda: [Programs(), *callbacks()], **options)
    traced, replayed = runs[False], runs[replay]
    programs = replayed.module.programs
    found = {name: program.replays for name, program in programs.items() if program.replays}
    assert found == replays, {name: program.replay_reasons for name, program in programs.items()}
    assert all(program.replays == 0 for program in traced.module.programs.values())
    assert len(traced.module.losses) > 0
    assert traced.module.losses == replayed.module.losses
    before, after = traced.module.state_dict(), replayed.module.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    mine, theirs = replayed.trainer.callback_metrics, traced.trainer.callback_metrics
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert replayed.trainer.global_step == traced.trainer.global_step
    progress = replayed.trainer.fit_loop.epoch_loop.state_dict()
    assert progress == traced.trainer.fit_loop.epoch_loop.state_dict()
    assert replayed.counters.executions == traced.counters.executions
    # Calls that are not replayed use the executables of the first run.
    assert replayed.counters.compiles <= traced.counters.compiles
    assert len(replayed.compiles) <= len(traced.compiles)
    return replayed


# ---- training ----------------------------------------------------------------------------------------


@isolated
def test_everything_logged_with_a_schedule_and_dropout() -> None:
    # Not replayed of 18 batches: the first (which creates metrics), two to compare, and the first of two later epochs.
    run = pair(lambda: Logging(dropout=0.3), {"train": 13}, max_epochs=3)
    assert run.module.programs["train"].replay_reasons == {}
    assert run.counters.compiles == 1
    assert run.counters.executions == 18


@pytest.mark.parametrize(
    "options",
    [
        {"gradient_clip_val": 0.3},
        {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"},
        {"precision": "bf16-mixed"},
    ],
    ids=str,
)
@isolated
def test_options(options: dict[str, Any]) -> None:
    pair(lambda: Logging(dropout=0.1), {"train": 8}, max_epochs=2, **options)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@isolated(timeout=400)
def test_two_hundred_steps(precision: str) -> None:
    """Three accumulations of two batches in an epoch of six; with a schedule, dropout and clipping."""
    options = {"max_epochs": 67, "accumulate_grad_batches": 2, "gradient_clip_val": 0.3, "precision": precision}
    run = pair(lambda: Logging(dropout=0.3), {"train": 395}, **options)
    assert run.trainer.global_step == 201


@isolated
def test_accumulation() -> None:
    run = pair(Logging, {"train": 11}, max_epochs=3, accumulate_grad_batches=2)
    assert run.trainer.global_step == 9


@isolated
def test_loggers_and_checkpoints_see_the_values_of_their_step(tmp_path: Any) -> None:
    logged = []
    for choice in (False, "auto"):
        logger = CSVLogger(tmp_path / str(choice), name="")
        callbacks = [
            Programs(),
            ModelCheckpoint(tmp_path / str(choice) / "ckpt", monitor="both"),
            LearningRateMonitor(),
        ]
        strategy = XLAEagerStrategy(step_replay=choice)  # type: ignore[arg-type]
        run = fit(Logging, strategy, callbacks=lambda: callbacks, logger=logger, log_every_n_steps=1)  # noqa: B023
        assert bool(run.module.programs["train"].replays) is (choice == "auto")
        logged.append((logger.experiment.metrics_file_path, callbacks[1].best_model_score))
    texts = [open(path).read() for path, _ in logged]  # noqa: SIM115
    assert texts[0] == texts[1]
    assert texts[0].count("\n") > 12
    assert torch.equal(logged[0][1], logged[1][1])


class Scoring(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(CLASSES)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        inputs, classes = batch
        outputs = self.net(inputs)
        self.accuracy(outputs, classes)
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        return nn.functional.cross_entropy(outputs, classes)


@isolated
def test_a_metric_of_the_module() -> None:
    pair(Scoring, {"train": 13}, max_epochs=3)


class LogsNorms(Classifier):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log_dict(grad_norm(self.net, norm_type=2))

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.2, gradient_clip_algorithm="norm")


@isolated
def test_hooks_of_the_module_in_the_middle_of_the_step() -> None:
    pair(LogsNorms, {"train": 8}, max_epochs=2)


class Manual(Classifier):
    """Two optimizers, each for a part of the network."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        first, second = self.optimizers()  # type: ignore[misc]
        loss = self.loss(batch)
        first.zero_grad()
        second.zero_grad()
        self.manual_backward(loss)
        first.step()
        second.step()
        self.log("loss", loss, prog_bar=True)
        return {"loss": loss}

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.AdamW(self.net[0].parameters(), lr=1e-2),
            torch.optim.SGD(self.net[1:].parameters(), lr=1e-1, momentum=0.9),
        ]


@isolated
def test_manual_optimization() -> None:
    run = pair(Manual, {"train": 8})
    assert run.trainer.global_step == 24


# ---- evaluation --------------------------------------------------------------------------------------


@isolated
def test_validation() -> None:
    pair(Classifier, {"train": 13, "validation_step": 7}, max_epochs=3, validation=lambda: loader(4, seed=1))


@isolated
def test_prediction_and_test_steps() -> None:
    class Predicting(Classifier):
        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.log("test_loss", self.loss(batch))

        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return {"scores": self.net(batch[0]).softmax(-1)}

    found: list[Any] = []
    for choice in (False, "auto"):
        L.seed_everything(3, verbose=False)
        module = Predicting()
        replays: dict[str, int] = {}

        class Counts(L.Callback):
            def on_predict_end(self, trainer: Any, pl_module: Any) -> None:
                self.on_test_end(trainer, pl_module)

            def on_test_end(self, trainer: Any, pl_module: Any) -> None:
                programs = trainer.strategy.run.steps.evaluation
                replays.update({name: item.replays for name, item in programs.items() if item.replays})  # noqa: B023

        trainer = L.Trainer(
            strategy=XLAEagerStrategy(step_replay=choice),  # type: ignore[arg-type]
            logger=False,
            enable_progress_bar=False,
            enable_checkpointing=False,
            callbacks=[Counts()],
        )
        tested = trainer.test(module, loader(6), verbose=False)
        predicted = trainer.predict(module, loader(6))
        found.append((tested, torch.cat([item["scores"] for item in predicted])))  # type: ignore[index, union-attr]
        assert replays == ({} if choice is False else {"test_step": 3, "predict_step": 4}), replays
    assert found[0][0] == found[1][0]
    assert torch.equal(found[0][1], found[1][1])


# ---- what changes, and what is not replayed ----------------------------------------------------------


@isolated
def test_interventions_between_steps_take_effect_at_once() -> None:
    class Intervening(L.Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            step = trainer.fit_loop.total_batch_idx
            if step == 6:
                trainer.gradient_clip_val = 0.01
            if step == 12:
                pl_module.net[0].weight.requires_grad_(False)
            if step == 18:
                pl_module.net[3].p = 0.9
            if step == 24:
                for group in trainer.optimizers[0].param_groups:
                    group["weight_decay"] = 0.5

    run = pair(
        lambda: Classifier(dropout=0.2),
        {"train": 20},
        max_epochs=1,
        data=lambda: loader(30),
        callbacks=lambda: [Intervening()],
    )
    assert any("requires_grad" in reason for reason in run.module.programs["train"].replay_reasons)


class Scaled(Classifier):
    scale = 1.0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * self.scale


@isolated
def test_what_the_step_reads_is_followed() -> None:
    class Scaling(L.Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            Scaled.scale = 1.0

        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 6:
                Scaled.scale = 0.5

    pair(Scaled, {"train": 7}, max_epochs=1, data=lambda: loader(12), callbacks=lambda: [Scaling()])


class ScaledByHistory(Classifier):
    """Its step reads the length of a list of tensors that grows between steps."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * (0.5 if len(self.kept) > 6 else 1.0)


@isolated
def test_what_a_list_holds_is_followed() -> None:
    pair(ScaledByHistory, {})


class Counting(Classifier):
    calls = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.calls += 1
        return super().training_step(batch, batch_idx)


class Printing(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx % 100 == 0:
            print("a hundred more")
        return super().training_step(batch, batch_idx)


class FollowingEpochs(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * (1 + self.current_epoch)


class OwnUpdate(Classifier):
    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (Counting, "Counting.training_step is not known to be safe to leave out: it sets self.calls"),
        (Printing, "batch_idx, which differs from step to step"),
        (FollowingEpochs, "it reads the property self.current_epoch"),
        (OwnUpdate, "OwnUpdate.optimizer_step is overridden"),
    ],
    ids=["counts", "prints", "epochs", "update"],
)
@isolated
def test_code_that_cannot_be_left_out_is_traced_with_one_line(make: type[Classifier], reason: str) -> None:
    run = pair(make, {}, max_epochs=1)
    assert any(reason in found for found in run.module.programs["train"].replay_reasons)


@isolated
def test_what_is_left_out_when_replay_was_asked_for() -> None:
    run = fit(Counting, XLAEagerStrategy(step_replay=True), callbacks=lambda: [Programs()], data=lambda: loader(12))
    assert run.module.programs["train"].replays == 0
    assert any("calls: " in reason for reason in run.module.programs["train"].replay_reasons)
    run = fit(Printing, XLAEagerStrategy(step_replay=True), callbacks=lambda: [Programs()], max_epochs=1)
    assert run.module.programs["train"].replays == 3


@isolated
def test_a_callback_in_the_middle_of_the_step_is_not_left_out() -> None:
    class Halving(L.Callback):
        calls = 0

        def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
            type(self).calls += 1
            for parameter in pl_module.parameters():
                parameter.grad.mul_(0.5)

    run = pair(Classifier, {}, max_epochs=1, callbacks=lambda: [Halving()])
    assert Halving.calls == 12
    assert any("Halving.on_after_backward" in reason for reason in run.module.programs["train"].replay_reasons)


class SkipsRest(Classifier):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 4 else None


@isolated
def test_a_batch_that_is_skipped_is_not_executed() -> None:
    pair(SkipsRest, {"train": 7}, max_epochs=3)


@isolated
def test_options_that_cannot_take_effect() -> None:
    with pytest.raises(ConfigError, match="unrolled"):
        XLAEagerStrategy(step_replay=True, accumulation="unrolled")
    with pytest.raises(ConfigError, match="CompiledStep"):
        xla_adapters.step(step_replay=True)
    with pytest.raises(ConfigError, match="step_replay='never'"):
        XLAEagerStrategy(step_replay="never")  # type: ignore[arg-type]


@pytest.mark.parametrize(("epochs", "replays"), [(2, 8), pytest.param(34, 192, marks=pytest.mark.slow)])
@pytest.mark.parametrize("sharding", ["dp", "fsdp"])
@isolated(env={"CPU_NUM_DEVICES": "8"}, timeout=400)
def test_under_spmd(sharding: str, epochs: int, replays: int) -> None:
    xla_adapters.initialize(spmd=True)
    found = []
    for choice in (False, "auto"):
        strategy = XLAEagerStrategy(step_replay=choice, sharding=sharding)  # type: ignore[arg-type]
        run = fit(lambda: Classifier(dropout=0.1), strategy, callbacks=lambda: [Programs()], max_epochs=epochs)
        assert run.module.programs["train"].replays == (0 if choice is False else replays)
        found.append((run.module.losses, run.module.state_dict()))
    assert found[0][0] == found[1][0]
    assert all(torch.equal(value, found[1][1][name]) for name, value in found[0][1].items())
