"""torchmetrics and `self.log` in training and validation have the values of the plain CPU, and read in no step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchmetrics
import torchmetrics.functional as metric_functions
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torchmetrics import classification, regression, text

from lightning_strategy import XLAEagerStrategy
from tests.lightning_strategy.scenarios import (
    CLASSES,
    Classifier,
    Outcome,
    fit,
    fit_both,
    loader,
    warnings_as_list,
)
from xla_adapters.errors import GraphBreakError
from xla_adapters.runtime.transfers import to_host_in_one_transfer

pytestmark = pytest.mark.isolated

MULTICLASS: dict[str, Callable[[], torchmetrics.Metric]] = {
    "accuracy_micro": lambda: classification.MulticlassAccuracy(CLASSES, average="micro"),
    "accuracy_macro": lambda: classification.MulticlassAccuracy(CLASSES, average="macro"),
    "accuracy_top2": lambda: classification.MulticlassAccuracy(CLASSES, top_k=2),
    "accuracy_ignoring": lambda: classification.MulticlassAccuracy(CLASSES, average="micro", ignore_index=0),
    "f1": lambda: classification.MulticlassF1Score(CLASSES),
    "auroc_binned": lambda: classification.MulticlassAUROC(CLASSES, thresholds=20),
    "auroc_exact": lambda: classification.MulticlassAUROC(CLASSES, thresholds=None),
}
REGRESSION: dict[str, Callable[[], torchmetrics.Metric]] = {
    "mse": regression.MeanSquaredError,
    "rmse": lambda: regression.MeanSquaredError(squared=False),
    "mae": regression.MeanAbsoluteError,
    "r2": regression.R2Score,
    "pearson": regression.PearsonCorrCoef,
}


def assert_same_metrics(ours: Any, plain: Any, tolerance: float = 1e-5) -> None:
    """The Trainer's three collections of metrics have the same names, types and values."""
    for name in ("callback_metrics", "logged_metrics", "progress_bar_metrics"):
        mine, theirs = getattr(ours, name), getattr(plain, name)
        assert list(mine) == list(theirs), name
        for key in theirs:
            assert type(mine[key]) is type(theirs[key]), (name, key)
            if isinstance(theirs[key], torch.Tensor):
                assert mine[key].device.type == "cpu", (name, key)
                assert (mine[key].dtype, mine[key].shape) == (theirs[key].dtype, theirs[key].shape), (name, key)
            assert float(mine[key]) == pytest.approx(float(theirs[key]), abs=tolerance, nan_ok=True), (name, key)


class Measured(Classifier):
    """Logs metrics as objects, in training and in validation."""

    def __init__(self, makers: dict[str, Callable[[], torchmetrics.Metric]], target: str = "class") -> None:
        super().__init__()
        self.train_metrics = torch.nn.ModuleDict({name: make() for name, make in makers.items()})
        self.val_metrics = torch.nn.ModuleDict({name: make() for name, make in makers.items()})
        self.target = target

    def update(self, metrics: Any, batch: Any, prefix: str) -> torch.Tensor:
        inputs, classes = batch
        logits = self.net(inputs)
        for name, metric in metrics.items():
            if self.target == "class":
                metric(logits, classes)
            else:
                metric(logits[:, 0], inputs[:, 0])
            self.log(f"{prefix}_{name}", metric, on_step=False, on_epoch=True)
        return torch.nn.functional.cross_entropy(logits, classes)

    def training_step(self, batch: Any, batch_idx: int) -> STEP_OUTPUT:
        return self.update(self.train_metrics, batch, "train")

    def validation_step(self, batch: Any, batch_idx: int) -> STEP_OUTPUT:
        self.log("val_loss", self.update(self.val_metrics, batch, "val"))
        return None


def assert_one_graph_each(run: Outcome, *, executions: int = 20) -> None:
    assert run.counters.compiles == 2, run.compiles  # training and validation
    assert run.counters.executions == executions  # batches


@pytest.mark.parametrize("kind", ["accuracy", "f1", "auroc"])
def test_classification_metrics_logged_as_objects(kind: str) -> None:
    makers = {name: make for name, make in MULTICLASS.items() if name.startswith(kind)}
    ours, plain = fit_both(lambda: Measured(makers), validation=lambda: loader(4, seed=1))
    assert_one_graph_each(ours)
    assert_same_metrics(ours.trainer, plain.trainer)


def test_regression_metrics_logged_as_objects() -> None:
    ours, plain = fit_both(lambda: Measured(REGRESSION, "number"), validation=lambda: loader(4, seed=1))
    assert_one_graph_each(ours)
    assert_same_metrics(ours.trainer, plain.trainer)


class LoggedOnStep(Classifier):
    """Logs for each batch a metric whose value cannot be traced."""

    def __init__(self) -> None:
        super().__init__()
        self.auroc = classification.MulticlassAUROC(CLASSES, thresholds=None)
        self.of_batches: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> STEP_OUTPUT:
        inputs, classes = batch
        logits = self.net(inputs)
        value = self.auroc(logits, classes)
        self.log("auroc", self.auroc, on_step=True, on_epoch=True)
        return {"loss": torch.nn.functional.cross_entropy(logits, classes), "auroc": value}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        self.of_batches.append(float(outputs["auroc"]))


class LoggingExtremes(Classifier):
    """The smallest and the largest value of a metric, of it alone and in a collection."""

    def __init__(self) -> None:
        super().__init__()
        self.alone = torchmetrics.MinMaxMetric(classification.MulticlassAccuracy(CLASSES))
        self.together = torchmetrics.MetricCollection(
            {"of": torchmetrics.MinMaxMetric(classification.MulticlassAccuracy(CLASSES, average="micro"))}
        )

    def training_step(self, batch: Any, batch_idx: int) -> STEP_OUTPUT:
        scores = self.net(batch[0])
        alone = self.alone(scores, batch[1])
        self.log_dict({**self.together(scores, batch[1]), **{f"alone {name}": alone[name] for name in alone}})
        return super().training_step(batch, batch_idx)


def test_extremes_of_a_metric() -> None:
    ours, plain = fit_both(LoggingExtremes, max_epochs=2)
    assert {"raw", "min", "max", "alone raw", "alone min", "alone max"} < plain.trainer.logged_metrics.keys()
    assert_same_metrics(ours.trainer, plain.trainer)


def test_value_that_cannot_be_traced_is_computed_behind_the_step() -> None:
    ours, plain = fit_both(LoggedOnStep)
    assert (ours.counters.compiles, ours.counters.executions) == (1, 12), ours.compiles
    assert ours.module.of_batches == pytest.approx(plain.module.of_batches, abs=1e-6)
    assert_same_metrics(ours.trainer, plain.trainer)


class UsesUntraceableValue(LoggedOnStep):
    def training_step(self, batch: Any, batch_idx: int) -> STEP_OUTPUT:
        outputs: Any = super().training_step(batch, batch_idx)
        return {"loss": outputs["loss"] * outputs["auroc"], "auroc": outputs["auroc"]}


def test_value_that_cannot_be_traced_raises_where_the_step_uses_it() -> None:
    with pytest.raises(GraphBreakError, match=r"value = self\.auroc"):
        fit(UsesUntraceableValue, XLAEagerStrategy())


class LogsSeveral(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> STEP_OUTPUT:
        self.log("scores", self.net(batch[0]).mean(0))
        return super().training_step(batch, batch_idx)


def test_several_elements_are_refused_as_by_lightning() -> None:
    with pytest.raises(ValueError, match=r"self.log\(scores, .*shape \[\d+\].* single element"):
        fit(LogsSeveral, XLAEagerStrategy())


class Highest(torchmetrics.Metric):
    """A metric whose update reads values on the host."""

    highest: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("highest", torch.tensor(0.0), dist_reduce_fx="max")

    def update(self, values: torch.Tensor) -> None:
        if values.max() > self.highest:
            self.highest = values.max()

    def compute(self) -> torch.Tensor:
        return self.highest


class ByHand(Classifier):
    """Updates metrics in steps, and computes and resets them at the end of the epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.confusion = classification.MulticlassConfusionMatrix(CLASSES)
        self.group = torchmetrics.MetricCollection(
            {
                "precision": classification.MulticlassPrecision(CLASSES),
                "recall": classification.MulticlassRecall(CLASSES),
            },
            compute_groups=[["precision", "recall"]],
        )
        self.guessed = torchmetrics.MetricCollection(
            [classification.MulticlassAccuracy(CLASSES), classification.MulticlassSpecificity(CLASSES)]
        )
        self.mean = torchmetrics.MeanMetric()
        self.pearson = regression.PearsonCorrCoef()
        self.highest = Highest()
        self.computed: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> STEP_OUTPUT:
        inputs, classes = batch
        logits = self.net(inputs)
        for metric in (self.confusion, self.group, self.guessed):
            metric.update(logits, classes)
        self.mean.update(torch.where(inputs[:, 0] > 1, float("nan"), inputs[:, 0]))
        self.pearson.update(logits[:, 0], inputs[:, 0])
        self.highest.update(inputs)
        self.log("functional", metric_functions.accuracy(logits, classes, "multiclass", num_classes=CLASSES))
        return torch.nn.functional.cross_entropy(logits, classes)

    def on_train_epoch_end(self) -> None:
        metrics: list[Any] = [self.confusion, self.group, self.guessed, self.mean, self.pearson, self.highest]
        self.computed += [metric.compute() for metric in metrics]
        for metric in metrics:
            metric.reset()


def test_metrics_updated_by_hand_and_computed_at_the_end_of_the_epoch() -> None:
    with warnings_as_list() as messages:
        ours, plain = fit_both(ByHand)
    assert (ours.counters.compiles, ours.counters.executions) == (1, 12), ours.compiles
    assert len(ours.module.computed) == 12
    torch.testing.assert_close(to_host_in_one_transfer(ours.module.computed), plain.module.computed, atol=1e-5, rtol=0)
    assert_same_metrics(ours.trainer, plain.trainer)
    assert sum("Highest: its update looks at values" in message for message in messages) == 1


class Language(Classifier):
    """Updates a metric of logits in steps, and one of strings outside of steps."""

    def __init__(self) -> None:
        super().__init__()
        self.perplexity, self.bleu, self.wer = text.Perplexity(), text.BLEUScore(n_gram=2), text.WordErrorRate()

    def validation_step(self, batch: Any, batch_idx: int) -> STEP_OUTPUT:
        inputs, classes = batch
        self.perplexity(self.net(inputs).unsqueeze(0), classes.unsqueeze(0))
        self.log("perplexity", self.perplexity)
        return None

    def on_validation_epoch_end(self) -> None:
        said, meant = ["the cat sat on the mat"], ["the cat sat on a mat"]
        self.wer(said, meant)
        self.bleu(said, [meant])
        self.log("wer", self.wer)
        self.log("bleu", self.bleu)


def test_text_metrics() -> None:
    ours, plain = fit_both(Language, validation=lambda: loader(4, seed=1))
    assert_one_graph_each(ours)
    assert_same_metrics(ours.trainer, plain.trainer)
    assert float(ours.trainer.callback_metrics["wer"]) == pytest.approx(1 / 6)


class Numbers(Classifier):
    """Logs in every way, also Python numbers, which are 0 and 1 at first."""

    def training_step(self, batch: Any, batch_idx: int) -> STEP_OUTPUT:
        loss = self.loss(batch)
        self.log("index", batch_idx, on_step=True, on_epoch=True)
        self.log("half", batch_idx / 2, prog_bar=True, on_step=False, on_epoch=True)
        for reduce in ("min", "max", "sum", "mean"):
            self.log(reduce, loss, reduce_fx=reduce, on_step=False, on_epoch=True)
        self.log("last", loss, on_step=True, on_epoch=False, logger=False)
        self.log("both", loss, on_step=True, on_epoch=True, prog_bar=True, batch_size=3)
        self.log_dict({"a": 2 * loss.detach(), "b": float(batch_idx)})
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> STEP_OUTPUT:
        self.log("val_index", float(batch_idx), on_step=True, on_epoch=True, prog_bar=True)
        self.log("val_loss", self.loss(batch))
        return None


def test_logged_numbers_and_reductions_are_those_of_the_cpu_in_value_and_type() -> None:
    ours, plain = fit_both(Numbers, validation=lambda: loader(4, seed=1))
    assert_one_graph_each(ours)
    assert_same_metrics(ours.trainer, plain.trainer)
    assert ours.trainer.callback_metrics["index_epoch"] == 2.5


class Reduced(Classifier):
    """Logs with each reduction that Lightning's message names, a NaN among the values."""

    def training_step(self, batch: Any, batch_idx: int) -> STEP_OUTPUT:
        loss = self.loss(batch)
        value = torch.where(torch.tensor(batch_idx == 2, device=loss.device), torch.nan, loss.detach())
        for name, reduce in {"max": max, "min": min, "sum": sum, "torch": torch.max}.items():
            self.log(name, value if name in ("max", "min") else loss, on_epoch=True, on_step=False, reduce_fx=reduce)
            self.log(f"{name}_both", loss, on_epoch=True, on_step=True, reduce_fx=reduce)
        self.log("count", batch_idx, on_epoch=True, reduce_fx=max)
        return loss


def test_reductions_by_the_builtin_functions() -> None:
    ours, plain = fit_both(Reduced, callbacks=list)
    assert_same_metrics(ours.trainer, plain.trainer)
    assert (ours.counters.compiles, ours.counters.executions) == (1, 12), ours.compiles
    assert float(ours.trainer.callback_metrics["count"]) == 5
