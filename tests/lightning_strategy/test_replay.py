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
from torch.utils.checkpoint import checkpoint

import xla_adapters
from lightning_strategy import XLAEagerStrategy
from tests.lightning_strategy.scenarios import CLASSES, FEATURES, Classifier, Outcome, fit, loader
from xla_adapters import ConfigError, XLAConfig

pytestmark = pytest.mark.isolated


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


def test_everything_logged_with_a_schedule_and_dropout() -> None:
    # Not replayed of 18 batches: the first (which creates metrics), two to compare, and the first of two later epochs.
    run = pair(lambda: Logging(dropout=0.3), {"train": 13}, max_epochs=3)
    assert run.module.programs["train"].replay_reasons == {}
    assert run.counters.compiles == 1
    assert run.counters.executions == 18


class Recomputing(Classifier):
    def loss(self, batch: Any) -> torch.Tensor:
        inputs, classes = batch
        return nn.functional.cross_entropy(checkpoint(self.net, inputs, use_reentrant=False), classes)


def test_activation_checkpointing() -> None:
    pair(Recomputing, {"train": 8})


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


def test_a_metric_of_the_module() -> None:
    pair(Scoring, {"train": 13}, max_epochs=3)


class LogsNorms(Classifier):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log_dict(grad_norm(self.net, norm_type=2))

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.2, gradient_clip_algorithm="norm")


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


def test_manual_optimization() -> None:
    run = pair(Manual, {"train": 8})
    assert run.trainer.global_step == 24


# ---- evaluation --------------------------------------------------------------------------------------


def test_validation() -> None:
    pair(Classifier, {"train": 13, "validation_step": 7}, max_epochs=3, validation=lambda: loader(4, seed=1))


def test_prediction_and_test_steps() -> None:
    class Predicting(Classifier):
        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.log("test_loss", self.loss(batch))

        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return {"scores": self.net(batch[0]).softmax(-1)}

        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            # Of a linear layer, whose result with three dimensions is a view; and tensors that stay themselves.
            return {
                "rows": self.net[0](batch[0][:, None]),
                "batch": batch[0],
                "weight": self.net[0].weight,
                "best": batch[0].max(dim=1),
            }

        def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            assert outputs["batch"] is batch[0]
            assert torch.equal(outputs["best"].indices, batch[0].argmax(1))
            assert outputs["weight"] is self.net[0].weight
            assert torch.allclose(outputs["rows"][:, 0], self.net[0](batch[0]), atol=1e-6)

    found: list[Any] = []
    for choice in (False, "auto"):
        L.seed_everything(3, verbose=False)
        module = Predicting()
        replays: dict[str, int] = {}

        class Counts(L.Callback):
            def on_predict_end(self, trainer: Any, pl_module: Any) -> None:
                self.on_test_end(trainer, pl_module)

            def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
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
        trainer.validate(module, loader(6), verbose=False)
        found.append((tested, torch.cat([item["scores"] for item in predicted])))  # type: ignore[index, union-attr]
        wanted = {"test_step": 3, "predict_step": 4, "validation_step": 3}
        assert replays == ({} if choice is False else wanted), replays
    assert found[0][0] == found[1][0]
    assert torch.equal(found[0][1], found[1][1])


# ---- what changes, and what is not replayed ----------------------------------------------------------


class ScaledByHistory(Classifier):
    """Its step reads the length of a list of tensors that grows between steps."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * (0.5 if len(self.kept) > 6 else 1.0)


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
def test_code_that_cannot_be_left_out_is_traced_with_one_line(make: type[Classifier], reason: str) -> None:
    run = pair(make, {}, max_epochs=1)
    assert any(reason in found for found in run.module.programs["train"].replay_reasons)


def test_what_is_left_out_when_replay_was_asked_for() -> None:
    run = fit(Counting, XLAEagerStrategy(step_replay=True), callbacks=lambda: [Programs()], data=lambda: loader(12))
    assert run.module.programs["train"].replays == 0
    assert any("calls: " in reason for reason in run.module.programs["train"].replay_reasons)
    run = fit(Printing, XLAEagerStrategy(step_replay=True), callbacks=lambda: [Programs()], max_epochs=1)
    assert run.module.programs["train"].replays == 3


class SkipsRest(Classifier):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 4 else None


def test_a_batch_that_is_skipped_is_not_executed() -> None:
    pair(SkipsRest, {"train": 7}, max_epochs=3)


def test_options_that_cannot_take_effect() -> None:
    with pytest.raises(ConfigError, match="unrolled"):
        XLAEagerStrategy(step_replay=True, accumulation="unrolled")
    with pytest.raises(ConfigError, match="CompiledStep"):
        xla_adapters.step(step_replay=True)
    with pytest.raises(ConfigError, match="step_replay='never'"):
        XLAEagerStrategy(step_replay="never")  # type: ignore[arg-type]


# ---- other code ---------------------------------------------------------------------------------------


class _At(L.Callback):
    """Calls a function with the module before each of some batches, by their indices."""

    def __init__(self, actions: dict[int, Callable[[Any], object]]) -> None:
        self.actions = actions

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx in self.actions:
            self.actions[batch_idx](pl_module)


class _Stages(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, FEATURES)
        self.calls: list[int] = []

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.net(self.first(inputs))  # type: ignore[no-any-return]

    def loss(self, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def second_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.loss(batch) * 0.5

    def third_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.loss(batch) * 0.1

    def counting_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.calls.append(1)
        return self.loss(batch)

    def second_forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.net(inputs)  # type: ignore[no-any-return]

    def third_forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.net(-inputs)  # type: ignore[no-any-return]

    def counting_forward_of_net(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls.append(1)
        return self.net(inputs)  # type: ignore[no-any-return]

    def counting_forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls.append(1)
        return inputs

    def halving(self, *arguments: Any) -> None:
        for parameter in self.net.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(0.5)


def _replaced(name: str, *others: str) -> dict[int, Callable[[Any], object]]:
    """Replaces a method every six batches."""

    def replace(other: str) -> Callable[[Any], object]:
        return lambda module: setattr(module, name, getattr(module, other))

    return {6 * (index + 1): replace(other) for index, other in enumerate(others)}


def _run(
    actions: dict[int, Callable[[Any], object]], replays: int, *, make: type[Classifier] = _Stages, **options: Any
) -> Any:
    found = {"train": replays} if replays else {}
    return pair(
        make, found, callbacks=lambda: [_At(actions)], **{"max_epochs": 1, "data": lambda: loader(20), **options}
    )


def test_other_code_takes_effect_at_once() -> None:
    _run(_replaced("training_step", "second_step", "third_step"), 13)
    # One more call is traced: without the first layer there is one gradient less.
    _run(_replaced("forward", "second_forward", "third_forward"), 12)
    _run(_replaced("on_after_backward", "halving"), 15)
    _run(_replaced("on_before_optimizer_step", "halving"), 15)


class _Rewritten(_Stages):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.loss(batch)


def test_other_code_of_the_class_takes_effect_at_once() -> None:
    def rewrite(module: Any) -> None:
        _Rewritten.training_step = _Stages.second_step  # type: ignore[method-assign]

    def put_back(module: Any) -> None:
        _Rewritten.training_step = stock  # type: ignore[method-assign]

    stock = _Rewritten.training_step
    _run({0: put_back, 6: rewrite}, 15, make=_Rewritten)


def test_other_code_is_examined_before_it_is_left_out() -> None:
    def in_a_known_module(module: Any) -> None:
        module.first.forward = module.counting_forward

    examples: list[tuple[dict[int, Callable[[Any], object]], int]] = [
        (_replaced("training_step", "second_step", "counting_step"), 7),
        (_replaced("forward", "second_forward", "counting_forward_of_net"), 6),
        ({12: in_a_known_module}, 9),
    ]
    for actions, replays in examples:
        run = _run(actions, replays)
        assert len(run.module.calls) == 8
        reasons = run.module.programs["train"].replay_reasons
        assert any("known to be safe" in reason for reason in reasons), reasons


class _Zeroes(Classifier):
    """Collects gradients in a hook of its own."""

    def __init__(self) -> None:
        super().__init__(optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05))

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        if batch_idx % 8 == 0:
            optimizer.zero_grad()


class _ZeroesLater(_Zeroes):
    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        if epoch > 0:
            optimizer.zero_grad()


class _KeepsBuffers(_Zeroes):
    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)


class _CountsClips(Classifier):
    clips = 0

    def clip_gradients(self, *args: Any, **kwargs: Any) -> None:
        type(self).clips += 1
        super().clip_gradients(*args, **kwargs)


class _Prefixes(Classifier):
    def log(self, name: str, *args: Any, **kwargs: Any) -> None:
        super().log("train/" + name, *args, **kwargs)


def test_what_hooks_are_given() -> None:
    _run({}, 17, make=_KeepsBuffers)
    _run({}, 17, make=_Prefixes)
    _run({}, 0, make=_Zeroes)
    _run({}, 0, make=_ZeroesLater, max_epochs=2, data=lambda: loader(8))
    _run({}, 0, make=_CountsClips, gradient_clip_val=0.1)
    assert _CountsClips.clips == 40


class _NoFunction(Classifier):
    def on_train_start(self) -> None:
        self.calls = 0
        self.training_step = _Called(self)  # type: ignore[method-assign]


class _Called:
    def __init__(self, module: Any) -> None:
        self.module = module

    def __call__(self, batch: Any, batch_idx: int) -> Any:
        return self.module.loss(batch)


def test_a_step_that_is_no_function() -> None:
    run = _run({}, 0, make=_NoFunction)
    assert any("it is a _Called" in reason for reason in run.module.programs["train"].replay_reasons)
