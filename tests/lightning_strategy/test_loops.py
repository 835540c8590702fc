"""Lightning's loops: evaluation during a fit, limits, stopping, and the other entry points beside `fit`."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Timer

import xla_adapters
from lightning_strategy import XLAEagerStrategy
from tests.device import ON_TORCH_TPU
from tests.lightning_strategy.scenarios import (
    BATCH,
    CLASSES,
    FEATURES,
    Classifier,
    assert_close,
    fit,
    fit_both,
    loader,
    trainer,
)
from tests.support import Stream
from xla_adapters import XLAConfig

pytestmark = pytest.mark.isolated


def logged(run: Any) -> dict[str, float]:
    return {name: float(value) for name, value in run.trainer.callback_metrics.items()}


def assert_logged_close(ours: Any, plain: Any) -> None:
    mine, theirs = logged(ours), logged(plain)
    assert mine.keys() == theirs.keys()
    assert_close(list(mine.values()), list(theirs.values()))


class Evaluated(Classifier):
    """Has all kinds of steps, and counts those of evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.evaluations: list[tuple[str, int]] = []

    def on_validation_epoch_end(self) -> None:
        if not self.trainer.sanity_checking:
            self.evaluations.append(("validation", self.global_step))

    def on_test_epoch_end(self) -> None:
        self.evaluations.append(("test", self.global_step))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch))

    def predict_step(self, batch: Any, batch_idx: int) -> dict[str, torch.Tensor]:
        return {"scores": self.net(batch[0]), "classes": batch[1]}


class SeveralLoaders(Evaluated):
    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", self.loss(batch))


class PredictsSeveral(Evaluated):
    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> dict[str, torch.Tensor]:
        return super().predict_step(batch, batch_idx)


_WHEN: dict[str, tuple[dict[str, Any], int]] = {
    "every second batch": ({"val_check_interval": 2}, 6),
    "twice an epoch": ({"val_check_interval": 0.5}, 4),
    "every second epoch": ({"check_val_every_n_epoch": 2}, 1),
    "every fifth batch of all": ({"val_check_interval": 5, "check_val_every_n_epoch": None}, 2),
    "sanity check": ({"num_sanity_val_steps": 2}, 2),
    "limited": ({"limit_train_batches": 3, "limit_val_batches": 1}, 2),
    "fraction": ({"limit_train_batches": 0.5, "limit_val_batches": 0.5}, 2),
    "max_steps in mid-epoch": ({"max_steps": 8, "max_epochs": -1, "val_check_interval": 4}, 1),
}


@pytest.mark.parametrize("when", sorted(_WHEN))
def test_validation_is_one_graph_whenever_it_comes(when: str) -> None:
    options, evaluations = _WHEN[when]
    ours, plain = fit_both(Evaluated, validation=lambda: loader(2, seed=1), **options)
    assert ours.module.evaluations == plain.module.evaluations
    assert len(ours.module.evaluations) == evaluations
    per_evaluation = 1 if "limit_val_batches" in options else 2
    batches = len(ours.module.losses) + (evaluations + ("sanity" in when)) * per_evaluation
    assert (ours.counters.compiles, ours.counters.executions) == (2, batches), ours.compiles
    assert_logged_close(ours, plain)


def test_several_validation_loaders_share_a_graph() -> None:
    ours, plain = fit_both(SeveralLoaders, validation=lambda: [loader(2, seed=1), loader(1, seed=2), loader(1, seed=3)])
    assert (ours.counters.compiles, ours.counters.executions) == (2, 12 + 2 * 4), ours.compiles
    assert {"val_loss/dataloader_idx_0", "val_loss/dataloader_idx_2"} <= logged(ours).keys()
    assert_logged_close(ours, plain)


def test_fast_dev_run() -> None:
    ours, plain = fit_both(Evaluated, validation=lambda: loader(2, seed=1), fast_dev_run=True)
    assert (ours.counters.compiles, ours.counters.executions) == (2, 1 + 1)
    assert_logged_close(ours, plain)


def test_overfit_batches() -> None:
    ours, _ = fit_both(Classifier, validation=loader, overfit_batches=2, max_epochs=3)
    assert (ours.counters.compiles, ours.counters.executions) == (2, 3 * (2 + 2))
    assert ours.module.losses[-2] < ours.module.losses[0]


class Stops(Classifier):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        self.trainer.should_stop = True


@pytest.mark.parametrize(("options", "batches"), [({}, 1), ({"min_epochs": 2}, 12), ({"min_steps": 8}, 8)])
def test_stopping_early_waits_for_the_minimum(options: dict[str, Any], batches: int) -> None:
    ours, plain = fit_both(Stops, max_epochs=5, **options)
    assert (ours.counters.compiles, ours.counters.executions) == (1, batches)
    assert ours.trainer.current_epoch == plain.trainer.current_epoch


def test_max_time() -> None:
    class Elapsed(Timer):
        """Pretends that each batch takes a second."""

        def time_elapsed(self, stage: Any = "train") -> float:
            return float(self.batches)

        def on_train_batch_end(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
            self.batches += 1
            super().on_train_batch_end(trainer, *args, **kwargs)

        batches = 0

    ours, _ = fit_both(Classifier, callbacks=lambda: [Elapsed("00:00:00:04")], max_epochs=5)
    assert (ours.counters.compiles, ours.counters.executions) == (1, 4)


def test_fit_whose_time_is_up_before_the_first_batch() -> None:
    ours = fit(Classifier, XLAEagerStrategy(), max_time={"seconds": 0})
    assert (ours.counters.compiles, ours.counters.executions, ours.module.losses) == (0, 0, [])
    torch.manual_seed(7)
    for mine, fresh in zip(ours.module.parameters(), Classifier().parameters(), strict=True):
        assert torch.equal(mine, fresh)


class SkipsTheRest(Classifier):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> Any:
        return -1 if batch_idx == self.current_epoch + 1 else None


@pytest.mark.parametrize(
    ("every", "accumulation", "counts"),
    [
        (1, "per_micro_batch", (1, 6)),
        # Graphs: the first batch of an accumulation, and later ones. The incomplete accumulation has no update.
        (4, "per_micro_batch", (2, 6)),
        (4, "unrolled", (3, 3)),
    ],
)
def test_on_train_batch_start_skips_the_rest_of_the_epoch(every: int, accumulation: Any, counts: Any) -> None:
    ours, plain = fit_both(
        SkipsTheRest,
        max_epochs=3,
        accumulate_grad_batches=every,
        config=XLAConfig(accumulation=accumulation, max_graphs=counts[0]),
    )
    assert len(ours.module.losses) == 1 + 2 + 3
    assert (ours.counters.compiles, ours.counters.executions) == counts, ours.compiles
    assert_logged_close(ours, plain)
    norms = [dict(run.module.net[1].named_buffers()) for run in (ours, plain)]
    assert norms[0]["num_batches_tracked"] == norms[1]["num_batches_tracked"] == 6
    torch.testing.assert_close(norms[0]["running_mean"], norms[1]["running_mean"], atol=2e-6, rtol=0)


class StopsAt(Classifier):
    """Stops in the middle of an accumulation."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.trainer.should_stop = batch_idx == 4


@pytest.mark.parametrize(("accumulation", "executions"), [("per_micro_batch", 5), ("unrolled", 2)])
def test_stop_in_mid_accumulation_keeps_what_was_computed(accumulation: Any, executions: int) -> None:
    ours, plain = fit_both(StopsAt, accumulate_grad_batches=3, config=XLAConfig(accumulation=accumulation))
    assert ours.counters.executions == executions
    assert len(ours.module.losses) == 5
    assert_logged_close(ours, plain)


def test_evaluation_alone_agrees_with_the_cpu() -> None:
    results = []
    for strategy in (XLAEagerStrategy(), None):
        L.seed_everything(7, verbose=False)
        module = Evaluated()
        run = trainer(strategy, limit_test_batches=3, limit_predict_batches=2)
        with xla_adapters.count() as counters:
            validated = run.validate(module, loader(4), verbose=False)
            tested = run.test(module, loader(4), verbose=False)
            predicted = run.predict(module, loader(4))
        results.append((validated[0]["val_loss"], tested[0]["test_loss"], predicted, counters))
    (val, test, predictions, counters), (plain_val, plain_test, plain_predictions, _) = results
    assert_close([val, test], [plain_val, plain_test])
    assert len(predictions) == len(plain_predictions) == 2
    for mine, theirs in zip(predictions, plain_predictions, strict=True):
        assert mine["scores"].device.type == mine["classes"].device.type == "cpu"
        torch.testing.assert_close(mine["scores"], theirs["scores"], atol=2e-6, rtol=0)
        assert torch.equal(mine["classes"], theirs["classes"])
    # Validation and test compute the same.
    assert (counters.compiles, counters.executions) == (2, 4 + 3 + 2), counters
    assert module.evaluations[-1][0] == "test"


def test_predictions_of_several_loaders_are_on_the_host_with_a_partial_batch() -> None:
    L.seed_everything(7, verbose=False)
    module = PredictsSeveral()
    predictions = trainer(XLAEagerStrategy()).predict(module, [loader(2), loader(rows=BATCH + 3)])
    plain = trainer().predict(module, [loader(2), loader(rows=BATCH + 3)])
    assert [[len(batch["scores"]) for batch in of_loader] for of_loader in predictions] == [[8, 8], [8, 3]]
    for mine, theirs in zip([*predictions[0], *predictions[1]], [*plain[0], *plain[1]], strict=True):
        torch.testing.assert_close(mine["scores"], theirs["scores"], atol=2e-6, rtol=0)


def test_a_second_trainer_in_the_same_process() -> None:
    first, plain = fit_both(Classifier)
    second, _ = fit_both(Classifier)
    assert second.module.losses == first.module.losses
    # It is the same graph, which torch_xla has compiled already.
    assert (second.counters.compiles, second.counters.executions) == (0, 12)
    assert_close(second.module.losses, plain.module.losses)


def test_fit_then_test_then_fit_again_with_one_trainer() -> None:
    runs = []
    for strategy in (XLAEagerStrategy(), None):
        L.seed_everything(7, verbose=False)
        module, run = Evaluated(), trainer(strategy, max_epochs=1)
        with xla_adapters.count() as counters:
            run.fit(module, loader(), loader(2, seed=1))
            tested = run.test(module, loader(2, seed=2), verbose=False)
            assert all(parameter.device.type == "cpu" for parameter in module.parameters())
            run.fit_loop.max_epochs = 3
            run.fit(module, loader(), loader(2, seed=1))
        runs.append((module, tested[0]["test_loss"], counters))
    (module, test_loss, counters), (plain, plain_loss, _) = runs
    assert_close([*module.losses, test_loss], [*plain.losses, plain_loss])
    assert module.evaluations == plain.evaluations
    assert len(module.losses) == 18
    # Validation and test compute the same.
    assert (counters.compiles, counters.executions) == (2, 18 + 3 * 2 + 2), counters


def test_two_runs_of_one_strategy_object_and_no_callback_is_left() -> None:
    strategy = XLAEagerStrategy()
    run = trainer(strategy, max_epochs=1)
    before = list(run.callbacks)
    module = Classifier()
    run.fit(module, loader())
    run.validate(module, loader(), verbose=False)
    assert run.callbacks == before
    with pytest.raises(RuntimeError, match="no run is under way"):
        strategy.run  # noqa: B018


# ---- data ----------------------------------------------------------------------------------


def stream() -> Any:
    """A loader without a length."""
    return torch.utils.data.DataLoader(Stream(loader(5).dataset), batch_size=BATCH)


@pytest.mark.parametrize(("every", "graphs"), [(1, 1), (3, 3)])
def test_iterable_dataset_of_unknown_length(every: int, graphs: int) -> None:
    ours, plain = fit_both(Evaluated, data=stream, validation=stream, accumulate_grad_batches=every)
    assert (ours.counters.compiles, ours.counters.executions) == (graphs + 1, 2 * (5 + 5)), ours.compiles
    assert_logged_close(ours, plain)


def test_iterable_dataset_in_unrolled_accumulation() -> None:
    ours, _ = fit_both(Classifier, data=stream, accumulate_grad_batches=3, config=XLAConfig(accumulation="unrolled"))
    assert (ours.counters.compiles, ours.counters.executions) == (2, 2 * 2), ours.compiles


class Combined(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        parts = list(batch.values()) if isinstance(batch, dict) else batch
        loss = torch.stack([self.loss(part) for part in parts if part is not None]).mean()
        self.log("loss", loss, batch_size=BATCH)
        return loss


@pytest.mark.parametrize("kind", ["dict", "list"])
def test_combined_loaders(kind: str) -> None:
    def combined() -> Any:
        parts = [loader(4), loader(2, seed=1)]
        loaders: Any = dict(zip("ab", parts, strict=True)) if kind == "dict" else parts
        return L.pytorch.utilities.CombinedLoader(loaders, "max_size_cycle")

    ours, _ = fit_both(Combined, data=combined)
    assert (ours.counters.compiles, ours.counters.executions) == (1, 8), ours.compiles


class Data(L.LightningDataModule):
    """Scales the batch in a hook, on the device."""

    def setup(self, stage: str) -> None:
        self.stages = [*getattr(self, "stages", []), stage]

    def train_dataloader(self) -> Any:
        return loader()

    def val_dataloader(self) -> Any:
        return loader(2, seed=1)

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0] * 2, batch[1]]


def test_data_module() -> None:
    ours, plain = fit_both(Evaluated, data=Data)
    assert (ours.counters.compiles, ours.counters.executions) == (2, 12 + 4)
    assert ours.trainer.datamodule.stages == plain.trainer.datamodule.stages == ["fit"]
    assert_logged_close(ours, plain)


def test_partial_last_batch_is_announced_with_its_shape_and_place() -> None:
    ours, _ = fit_both(Classifier, data=lambda: loader(rows=4 * BATCH + 3))
    assert (ours.counters.compiles, ours.counters.executions) == (2, 10)
    (line,) = ours.compiles
    assert "batch 4 of epoch 0" in line
    assert "[0]: (8, 8) float32 -> (3, 8) float32" in line


def test_partial_batch_of_validation_is_announced_and_weighted() -> None:
    ours, plain = fit_both(Evaluated, validation=lambda: loader(rows=BATCH + 3, seed=1))
    assert (ours.counters.compiles, ours.counters.executions) == (3, 12 + 2 * 2)
    (line,) = ours.compiles
    assert line.startswith("validation_step")
    assert "batch 1" in line
    assert "(3, 8)" in line
    assert_logged_close(ours, plain)


def test_changing_shapes_are_a_graph_each() -> None:
    def batches() -> Any:
        rows = list(loader(6).dataset)  # type: ignore[call-overload]
        sizes = [4, 6, 8, 4, 6, 8]
        chosen, start = [], 0
        for size in sizes:
            chosen.append(list(range(start, start + size)))
            start += size
        return torch.utils.data.DataLoader(rows, batch_sampler=chosen)

    ours, _ = fit_both(Classifier, data=batches)
    assert (ours.counters.compiles, ours.counters.executions) == (3, 12)
    assert len(ours.compiles) == 2


def test_loader_with_workers() -> None:
    ours, _ = fit_both(Classifier, data=lambda: loader(num_workers=2, shuffle=True))
    assert (ours.counters.compiles, ours.counters.executions) == (1, 12)


class Augments(Classifier):
    """Adds noise to the batch, on the device."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        inputs, classes = batch
        if not self.trainer.training:
            return batch
        noisy = inputs + 0.1 * torch.randn_like(inputs)
        return [torch.where(torch.rand(len(inputs), 1, device=inputs.device) < 0.5, noisy.flip(-1), noisy), classes]


def test_augmentation_on_the_device_repeats() -> None:
    first, again = (fit(Augments, XLAEagerStrategy()) for _ in range(2))
    assert first.module.losses == again.module.losses
    assert len({round(loss, 4) for loss in first.module.losses}) == 12
    plain = fit(Classifier, XLAEagerStrategy())
    assert (first.counters.compiles, first.counters.executions) == (1, 12)
    # Each batch costs one more execution, before its step; on TorchTPU one of each operation.
    assert first.counters.eager_ops - plain.counters.eager_ops == 12 * (9 if ON_TORCH_TPU else 1)


class Centers(Classifier):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        inputs, classes = batch
        return [(inputs - inputs.mean(0)) / (inputs.std(0) + 1e-3), classes.clamp(max=CLASSES - 2)]


def test_transform_on_the_device_agrees_with_the_cpu() -> None:
    ours, plain = fit_both(Centers, validation=lambda: loader(2, seed=1))
    without = fit(Classifier, XLAEagerStrategy(), validation=lambda: loader(2, seed=1))
    assert (ours.counters.compiles, ours.counters.executions) == (2, 12 + 4)
    assert ours.counters.eager_ops - without.counters.eager_ops == (12 + 4) * (6 if ON_TORCH_TPU else 1)
    assert_logged_close(ours, plain)


class PullsBatches(Classifier):
    """Takes the batches from the iterator itself."""

    def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
        batch, _, _ = next(dataloader_iter)
        return self.loss([part.to(self.device) for part in batch])


def test_training_step_that_pulls_its_batches() -> None:
    ours, _ = fit_both(PullsBatches)
    assert (ours.counters.compiles, ours.counters.executions) == (1, 12), ours.compiles


class Records:
    """A batch of a user-defined class, which holds other values beside tensors."""

    def __init__(self, inputs: Any, classes: Any, names: list[str]) -> None:
        self.inputs, self.classes, self.names = inputs, classes, names

    def to(self, device: Any, **options: Any) -> Records:
        return Records(self.inputs.to(device), self.classes.to(device), self.names)


class TakesRecords(Classifier):
    def loss(self, batch: Any) -> torch.Tensor:
        assert len(batch.names) == len(batch.inputs)
        return super().loss([batch.inputs, batch.classes])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)


def test_batches_of_a_class_of_the_users() -> None:
    def records() -> Any:
        def collate(rows: list[Any]) -> Records:
            inputs, classes = torch.utils.data.default_collate(rows)
            return Records(inputs, classes, ["a row"] * len(rows))

        return loader(collate_fn=collate)

    ours, _ = fit_both(TakesRecords, data=records)
    assert (ours.counters.compiles, ours.counters.executions) == (1, 12), ours.compiles


class ConfiguresModel(Classifier):
    def __init__(self) -> None:
        super().__init__()
        del self.net

    def configure_model(self) -> None:
        if not hasattr(self, "net"):
            self.net = torch.nn.Linear(FEATURES, CLASSES)
            torch.nn.init.constant_(self.net.weight, 0.1)
            torch.nn.init.zeros_(self.net.bias)


def test_model_made_on_the_device() -> None:
    ours, _ = fit_both(ConfiguresModel)
    assert (ours.counters.compiles, ours.counters.executions) == (1, 12), ours.compiles


def test_barebones() -> None:
    options = {"enable_checkpointing": None, "enable_progress_bar": None, "enable_model_summary": None}
    ours, _ = fit_both(Classifier, barebones=True, logger=None, num_sanity_val_steps=None, **options)
    assert (ours.counters.compiles, ours.counters.executions) == (1, 12), ours.counters
