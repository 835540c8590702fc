"""Evaluation and prediction: exact values, one graph per shape, one transfer per batch."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
from transformers import EarlyStoppingCallback, EvalPrediction

import hf_trainer
import xla_adapters
from tests.device import DEVICE
from tests.hf_trainer.scenarios import (
    Classifier,
    arguments,
    assert_close,
    assert_parity,
    gpt2,
    on_cpu,
    ours,
    reference,
    steps_of,
    token_samples,
    vector_samples,
)
from tests.support import Stream

pytestmark = pytest.mark.isolated


def _trainer(model: Any, data: Any, **options: Any) -> hf_trainer.Trainer:
    args = options.pop("args", None) or arguments()
    return hf_trainer.Trainer(model=model, args=args, eval_dataset=data, **options)


def _graphs(trainer: Any) -> int:
    return int(steps_of(trainer).evaluation["eval_step"].graphs)


def test_loss_is_exact_when_the_last_batch_is_partial() -> None:
    """Stock on XLA gives the last batch the weight of a full one."""
    data = vector_samples(10)
    with on_cpu(Classifier(), None, eval_dataset=data) as trainer:
        expected = trainer.evaluate()
    trainer = _trainer(Classifier(), data)
    with xla_adapters.count() as first:
        actual = trainer.evaluate()
    with xla_adapters.count() as second:
        again = trainer.evaluate()
    assert_close([actual["eval_loss"]], [expected["eval_loss"]], 1e-6)
    assert again["eval_loss"] == actual["eval_loss"]
    # Two graphs, for full and partial batches; 3 batches.
    assert (first.compiles, first.executions, first.transfers_to_host) == (2, 3, 3)
    assert (second.compiles, second.executions, second.transfers_to_host, second.eager_ops) == (0, 3, 3, 0)
    # The mean over samples differs from the mean of batch means.
    with torch.no_grad():
        model = Classifier()
        each = [float(model(s["x"][None], torch.tensor([s["labels"]]))["loss"]) for s in data]
    assert_close([actual["eval_loss"]], [sum(each) / 10], 1e-6)
    means = [sum(each[0:4]) / 4, sum(each[4:8]) / 4, sum(each[8:10]) / 2]
    assert abs(actual["eval_loss"] - sum(means) / 3) > 1e-4


def _metrics(prediction: EvalPrediction) -> dict[str, float]:
    labels = prediction.label_ids
    values = {"accuracy": float((prediction.predictions.argmax(-1) == labels).mean()), "count": float(len(labels))}
    if prediction.losses is not None:
        values["losses"] = float(np.sum(prediction.losses))
    if prediction.inputs is not None:
        values["inputs"] = float(np.sum(prediction.inputs))
    return values


def test_compute_metrics() -> None:
    data, options = vector_samples(10), {"include_for_metrics": ["loss"]}
    with on_cpu(Classifier(), None, eval_dataset=data, compute_metrics=_metrics, args=options) as trainer:
        expected = trainer.evaluate()
    trainer = _trainer(Classifier(), data, args=arguments(**options), compute_metrics=_metrics)
    with xla_adapters.count() as counts:
        actual = trainer.evaluate()
    assert {"eval_accuracy", "eval_count", "eval_losses", "eval_loss"} <= actual.keys()
    for name in ("eval_accuracy", "eval_count", "eval_losses", "eval_loss"):
        assert_close([actual[name]], [expected[name]])
    # Loss, logits and labels of a batch come in one transfer.
    assert (counts.compiles, counts.executions, counts.transfers_to_host) == (2, 3, 3)


def test_preprocess_logits_runs_in_the_graph_and_inputs_stay_on_the_host() -> None:
    devices: list[str] = []

    def preprocess(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        devices.append(logits.device.type)
        return logits.argmax(-1)

    def metrics(prediction: EvalPrediction) -> dict[str, float]:
        assert prediction.predictions.shape == prediction.label_ids.shape == prediction.inputs.shape == (6, 8)
        return {
            "same": float((prediction.predictions == prediction.label_ids).sum()),
            "tokens": float(prediction.inputs.sum()),
        }

    options = {"include_for_metrics": ["inputs"]}
    common: dict[str, Any] = {"compute_metrics": metrics, "preprocess_logits_for_metrics": preprocess}
    data = token_samples(6)
    with on_cpu(gpt2(), None, args=options, eval_dataset=data, **common) as trainer:
        expected = trainer.evaluate()
    devices.clear()
    trainer = _trainer(gpt2(), data, args=arguments(**options), **common)
    with xla_adapters.count() as counts:
        actual = trainer.evaluate()
    assert devices == [DEVICE, DEVICE]
    assert trainer.preprocess_logits_for_metrics is preprocess
    for name in ("eval_same", "eval_tokens", "eval_loss"):
        assert_close([actual[name]], [expected[name]])
    assert (counts.compiles, counts.executions, counts.transfers_to_host, counts.eager_ops) == (2, 2, 2, 0)


def test_batch_eval_metrics() -> None:
    class Running:
        """Metrics added up batch by batch, as `batch_eval_metrics` wants them."""

        def __init__(self) -> None:
            self.right, self.seen = 0.0, 0
            self.ends: list[bool] = []

        def __call__(self, prediction: EvalPrediction, compute_result: bool) -> dict[str, float]:
            self.right += float((prediction.predictions.argmax(-1) == prediction.label_ids).sum())
            self.seen += len(prediction.label_ids)
            self.ends.append(compute_result)
            return {"accuracy": self.right / self.seen} if compute_result else {}

    data, options = vector_samples(10), {"batch_eval_metrics": True}
    theirs, mine = Running(), Running()
    with on_cpu(Classifier(), None, eval_dataset=data, compute_metrics=theirs, args=options) as trainer:
        expected = trainer.evaluate()
    actual = _trainer(Classifier(), data, args=arguments(**options), compute_metrics=mine).evaluate()
    assert mine.ends == theirs.ends == [False, False, True]
    assert mine.seen == 10
    assert actual["eval_accuracy"] == expected["eval_accuracy"]
    assert_close([actual["eval_loss"]], [expected["eval_loss"]])


def test_predict() -> None:
    data = vector_samples(10)
    with on_cpu(Classifier(), None) as trainer:
        expected = trainer.predict(data)
    trainer = _trainer(Classifier(), None)
    with xla_adapters.count() as counts:
        actual = trainer.predict(data)
    assert actual.predictions.shape == (10, 3)
    np.testing.assert_allclose(actual.predictions, expected.predictions, atol=1e-5)
    np.testing.assert_array_equal(actual.label_ids, expected.label_ids)
    assert_close([actual.metrics["test_loss"]], [expected.metrics["test_loss"]])
    assert (counts.compiles, counts.executions, counts.transfers_to_host) == (2, 3, 3)
    # Without labels there is no loss.
    unlabelled = [{"x": sample["x"]} for sample in data]
    assert trainer.predict(unlabelled).label_ids is None


def _by_hand(data: list[Any]) -> list[float]:
    """The loss of each sample."""
    model = Classifier()
    with torch.no_grad():
        return [float(model(sample["x"][None], torch.tensor([sample["labels"]]))["loss"]) for sample in data]


@pytest.mark.parametrize(
    ("samples", "options"),
    [
        (8, {}),
        (10, {}),
        (9, {"prediction_loss_only": True}),
        (9, {"eval_accumulation_steps": 2}),
        (10, {"dataloader_drop_last": True}),
        (1, {}),
    ],
)
def test_loss_of_a_stream_is_that_of_its_samples(samples: int, options: dict[str, Any]) -> None:
    """Stock gives the last batch the weight of a full one, on every device."""
    data = vector_samples(samples)
    trainer = _trainer(Classifier(), Stream(data), args=arguments(**options))
    metrics = trainer.evaluate()
    each = _by_hand(data)
    # transformers drops no batch of an IterableDataset, whatever dataloader_drop_last says.
    assert_close([metrics["eval_loss"]], [sum(each) / samples], 1e-6)
    assert_close([trainer.predict(Stream(data)).metrics["test_loss"]], [sum(each) / samples], 1e-6)
    count = metrics["eval_samples_per_second"] * metrics["eval_runtime"]
    assert count == pytest.approx(samples, rel=0.1)


def test_streams_by_name_and_losses_for_metrics() -> None:
    data = {"one": vector_samples(10), "two": vector_samples(9, seed=1)}
    seen: list[int] = []

    def metrics(prediction: EvalPrediction) -> dict[str, float]:
        seen.append(len(prediction.losses))
        assert len(prediction.losses) == len(prediction.predictions) == len(prediction.label_ids)
        return {"sum": float(np.sum(prediction.losses))}

    streams = {name: Stream(samples) for name, samples in data.items()}
    args = arguments(include_for_metrics=["loss"])
    actual = _trainer(Classifier(), streams, args=args, compute_metrics=metrics).evaluate()
    assert seen == [10, 9]
    for name, samples in data.items():
        each = _by_hand(samples)
        assert_close([actual[f"eval_{name}_loss"]], [sum(each) / len(each)], 1e-6)
        assert_close([actual[f"eval_{name}_sum"]], [sum(each)])


def test_batch_eval_metrics_of_a_stream() -> None:
    sizes: list[tuple[int, int, bool]] = []

    def metrics(prediction: EvalPrediction, compute_result: bool) -> dict[str, float]:
        sizes.append((len(prediction.losses), len(prediction.label_ids), compute_result))
        return {"batches": float(len(sizes))} if compute_result else {}

    data = vector_samples(9)
    args = arguments(batch_eval_metrics=True, include_for_metrics=["loss"])
    actual = _trainer(Classifier(), Stream(data), args=args, compute_metrics=metrics).evaluate()
    assert sizes == [(4, 4, False), (4, 4, False), (1, 1, True)]
    assert actual["eval_batches"] == 3
    assert_close([actual["eval_loss"]], [sum(_by_hand(data)) / 9], 1e-6)


def test_batches_of_different_sizes() -> None:
    """From a user's loader, whose sizes accelerate does not know."""

    class Own(hf_trainer.Trainer):
        def get_eval_dataloader(self, *args: Any, **kwargs: Any) -> Any:
            rows = [[0, 1, 2, 3], [4], [5, 6], [7, 8, 9]]
            return torch.utils.data.DataLoader(data, batch_sampler=rows, collate_fn=self.data_collator)

    data = vector_samples(10)
    trainer = Own(model=Classifier(), args=arguments(), eval_dataset=data)
    assert_close([trainer.evaluate()["eval_loss"]], [sum(_by_hand(data)) / 10], 1e-6)


def test_a_prediction_step_of_ones_own() -> None:
    """`super().prediction_step` returns the plain loss to it, and the loop gets its result."""
    losses: list[torch.Tensor] = []

    class Own(hf_trainer.Trainer):
        def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
            loss, logits, labels = super().prediction_step(*args, **kwargs)
            assert type(loss) is torch.Tensor
            losses.append(loss)
            return 2 * loss, logits, labels

    data = vector_samples(10)
    trainer = Own(model=Classifier(), args=arguments(), eval_dataset=Stream(data))
    assert_close([trainer.evaluate()["eval_loss"]], [2 * sum(_by_hand(data)) / 10], 1e-6)
    assert len(losses) == 3
    assert "prediction_step" not in vars(trainer)

    def alone(*args: Any, **kwargs: Any) -> Any:
        return torch.tensor(3.0), None, None

    trainer.prediction_step = alone
    assert trainer.evaluate()["eval_loss"] == 3.0
    assert trainer.prediction_step is alone
    trainer.prediction_step = broken = lambda *args, **kwargs: 1 / 0
    with pytest.raises(ZeroDivisionError):
        trainer.evaluate()
    assert trainer.prediction_step is broken


def test_the_best_model_by_a_stream() -> None:
    args = {
        "eval_strategy": "steps",
        "eval_steps": 1,
        "save_strategy": "best",
        "metric_for_best_model": "eval_loss",
        "greater_is_better": False,
        "max_steps": 6,
        "learning_rate": 1.0,
        "optim": "sgd",
    }
    data, held_out = vector_samples(24), vector_samples(9, seed=1)
    # If the dataset has a length, stock on CPU weighs correctly.
    expected = reference(Classifier(), data, args=args, eval_dataset=held_out)
    run = ours(Classifier(), data, args=arguments(**args), eval_dataset=Stream(held_out))
    assert_close(run.logged("eval_loss"), expected.logged("eval_loss"))
    assert run.trainer.state.best_global_step == expected.trainer.state.best_global_step


def test_evaluation_uncompiled() -> None:
    data = vector_samples(10)
    with on_cpu(Classifier(), None, eval_dataset=data) as trainer:
        expected = trainer.evaluate()
    trainer = _trainer(Classifier(), data, compile_eval=False)
    with xla_adapters.count() as counts:
        actual = trainer.evaluate()
    assert_close([actual["eval_loss"]], [expected["eval_loss"]])
    assert counts.compiles == 0
    assert counts.eager_ops > 0


def test_several_datasets_and_evaluation_in_half_precision() -> None:
    data = {"one": vector_samples(8), "two": vector_samples(8, seed=1)}
    with on_cpu(Classifier(), None, eval_dataset=data) as trainer:
        expected = trainer.evaluate()
    trainer = _trainer(Classifier(), data)
    actual = trainer.evaluate()
    for name in ("eval_one_loss", "eval_two_loss"):
        assert_close([actual[name]], [expected[name]])
    assert _graphs(trainer) == 1
    for option, dtype, tolerance in (("bf16_full_eval", torch.bfloat16, 2e-2), ("fp16_full_eval", torch.float16, 2e-3)):
        collate = functools.partial(_in_half_precision, dtype)
        half = _trainer(Classifier(), data["one"], args=arguments(**{option: True}), data_collator=collate)
        assert next(half.model.parameters()).dtype == torch.float32
        result = half.evaluate()
        assert next(half.model.parameters()).dtype == dtype
        assert_close([result["eval_loss"]], [expected["eval_one_loss"]], tolerance)


def _in_half_precision(dtype: torch.dtype, samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    return {
        "x": torch.stack([sample["x"] for sample in samples]).to(dtype),
        "labels": torch.tensor([sample["labels"] for sample in samples]),
    }


def test_evaluation_during_training() -> None:
    """It adds its own graphs and none to the training step."""
    args = {"eval_strategy": "steps", "eval_steps": 2, "max_steps": 6, "eval_on_start": True}
    run = assert_parity(Classifier, vector_samples(24), args=args, eval_dataset=vector_samples(10, seed=1))
    assert steps_of(run.trainer).train.graphs == 1
    assert _graphs(run.trainer) == 2
    assert run.counts.compiles <= 3
    assert [step.executions for step in run.steps] == [1] * 6
    assert len(run.logged("eval_loss")) == 4


def test_early_stopping_and_best_model() -> None:
    args = {
        "eval_strategy": "steps",
        "eval_steps": 1,
        "save_strategy": "steps",
        "save_steps": 1,
        "max_steps": 12,
        "learning_rate": 3.0,
        "optim": "sgd",
        "lr_scheduler_type": "constant",
        "load_best_model_at_end": True,
        "metric_for_best_model": "eval_loss",
        "greater_is_better": False,
    }
    data, held_out = vector_samples(24), vector_samples(8, seed=1)

    def callbacks() -> list[Any]:
        return [EarlyStoppingCallback(early_stopping_patience=2)]

    expected = reference(Classifier(), data, args=args, eval_dataset=held_out, callbacks=callbacks())
    run = ours(Classifier(), data, args=arguments(**args), eval_dataset=held_out, callbacks=callbacks())
    assert_close(run.losses, expected.losses, 1e-4)  # lr 3: errors grow
    assert_close(run.logged("eval_loss"), expected.logged("eval_loss"), 1e-4)
    assert run.trainer.state.global_step == expected.trainer.state.global_step < 12
    assert run.trainer.state.best_global_step == expected.trainer.state.best_global_step
    best = min(run.logged("eval_loss"))
    assert_close([run.trainer.evaluate()["eval_loss"]], [best], 1e-6)
    assert steps_of(run.trainer).train.graphs == 1


@pytest.mark.parametrize("strategy", ["steps", "epoch", "best"])
def test_save_strategies(strategy: str, tmp_path: Any) -> None:
    args = {
        "max_steps": 6,
        "save_strategy": strategy,
        "save_steps": 4,
        "eval_strategy": "steps",
        "eval_steps": 1,
        "metric_for_best_model": "eval_loss",
    }
    data = vector_samples(12)
    expected = reference(Classifier(), data, args={**args, "folder": str(tmp_path / "theirs")}, eval_dataset=data)
    folder = tmp_path / "ours"
    run = ours(Classifier(), data, args=arguments(str(folder), **args), eval_dataset=data)
    saved = sorted(path.name for path in folder.glob("checkpoint-*"))
    assert saved == sorted(path.name for path in (tmp_path / "theirs").glob("checkpoint-*"))
    assert saved
    assert run.losses == pytest.approx(expected.losses, abs=1e-5)
    assert steps_of(run.trainer).train.graphs == 1, run.explain()
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json"):
        assert (folder / saved[0] / name).is_file()


class _MeanOnly(Classifier):
    """Predicts a number for each sample, and one for the batch."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, Any]:
        results: dict[str, Any] = super().forward(x, labels)
        return {"loss": results["loss"], "logits": (results["logits"], results["logits"].mean())}


def test_predictions_without_dimensions_stay_so() -> None:
    data = vector_samples(4)
    with on_cpu(_MeanOnly(), None, eval_dataset=data) as trainer:
        expected = trainer.predict(data).predictions
    actual = _trainer(_MeanOnly(), data).predict(data).predictions
    assert [part.shape for part in actual] == [part.shape for part in expected]
    assert actual[1].shape == ()
    assert_close([float(actual[1])], [float(expected[1])], 1e-6)
