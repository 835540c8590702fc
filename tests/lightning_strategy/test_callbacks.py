"""Lightning's callbacks, profilers and loggers: the values of the plain CPU, and what they cost."""

from __future__ import annotations

import csv
import gc
import logging
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.utilities.throughput import ThroughputMonitor as FabricThroughputMonitor
from lightning.pytorch import callbacks as of_lightning
from lightning.pytorch.callbacks import (
    DeviceStatsMonitor,
    EarlyStopping,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelPruning,
    OnExceptionCheckpoint,
    StochasticWeightAveraging,
    ThroughputMonitor,
    TQDMProgressBar,
)
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.profilers import AdvancedProfiler, Profiler, SimpleProfiler, XLAProfiler
from torch import nn

import xla_adapters
from lightning_strategy import XLAEagerFabricStrategy, XLAEagerStrategy
from lightning_strategy.connector import XLAEagerAccelerator
from tests.lightning_strategy.scenarios import (
    ANYTHING,
    CLASSES,
    FEATURES,
    Classifier,
    Outcome,
    WithoutBatchNorm,
    assert_close,
    fit,
    fit_both,
    loader,
    trainer,
)
from xla_adapters import XLAConfig

pytestmark = pytest.mark.isolated


class Shown(Classifier):
    """Logs two values for the progress bar."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss, prog_bar=True)
        self.log("twice", 2 * loss, prog_bar=True)
        return loss


class Scheduled(Classifier):
    """Has another learning rate at each step."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def assert_same_weights(ours: Outcome, plain: Outcome) -> None:
    theirs = plain.module.state_dict()
    for name, value in ours.module.state_dict().items():
        torch.testing.assert_close(
            value, theirs[name], atol=2e-6, rtol=0, msg=lambda text, name=name: f"{name}: {text}"
        )


def assert_counts(run: Outcome, *, compiles: int = 1, executions: int = 12) -> None:
    assert (run.counters.compiles, run.counters.executions) == (compiles, executions), run.compiles


def more_transfers(**options: Callable[[], Any]) -> int:
    """How many more transfers to the host 12 batches cost than 6; each option is a function that makes its value."""
    counts = [
        fit(
            Shown,
            # The verification of a replay costs a transfer.
            XLAEagerStrategy(XLAConfig(replay_verify_every=None)),
            data=lambda batches=batches: loader(batches),  # type: ignore[misc]
            max_epochs=1,
            **{name: make() if name != "callbacks" else make for name, make in options.items()},  # type: ignore[arg-type]
        ).counters.transfers_to_host
        for batches in (6, 12)
    ]
    return counts[1] - counts[0]


def logged(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


# ---- saving and stopping ------------------------------------------------------------------------


def test_model_checkpoint_keeps_the_same_best_files_and_the_last(tmp_path: Path) -> None:
    folders = iter([tmp_path / "xla", tmp_path / "cpu"])

    def callbacks() -> list[Any]:
        return [
            ModelCheckpoint(
                next(folders), "{step}", monitor="loss", save_top_k=2, save_last=True, every_n_train_steps=2
            )
        ]

    ours, plain = fit_both(Classifier, callbacks=callbacks)
    assert_counts(ours)
    names = [sorted(path.name for path in (tmp_path / side).glob("*.ckpt")) for side in ("xla", "cpu")]
    assert names[0] == names[1]
    assert len(names[0]) == 3
    mine, theirs = ours.trainer.checkpoint_callback, plain.trainer.checkpoint_callback
    assert Path(mine.best_model_path).name == Path(theirs.best_model_path).name
    assert_close([float(mine.best_model_score)], [float(theirs.best_model_score)])


def test_early_stopping_stops_after_the_same_epoch() -> None:
    ours, plain = fit_both(
        Classifier,
        validation=loader,
        max_epochs=6,
        callbacks=lambda: [EarlyStopping("val_loss", patience=0, min_delta=0.5)],
    )
    assert ours.trainer.early_stopping_callback.stopped_epoch == 1
    assert plain.trainer.early_stopping_callback.stopped_epoch == 1
    assert_counts(ours, compiles=2, executions=24)


def test_max_time_ends_the_run_between_steps() -> None:
    in_time, _ = fit_both(Classifier, max_epochs=1, max_time=timedelta(hours=1))
    assert_counts(in_time, executions=6)
    too_late = fit(Classifier, XLAEagerStrategy(), max_time={"seconds": 0})
    assert_counts(too_late, compiles=0, executions=0)


# ---- pruning ------------------------------------------------------------------------------------


class PruningOfCopies(ModelPruning):
    """Without what a CPU alone does: parameters that are put back share the memory of the originals, and train them."""

    @staticmethod
    def _copy_param(new: nn.Module, old: nn.Module, name: str) -> None:
        ModelPruning._copy_param(new, old, name)
        parameter = getattr(new, f"{name}_orig", getattr(new, name))
        parameter.data = parameter.data.clone()


@pytest.mark.parametrize("step_replay", ["auto", False])
def test_pruning_with_the_lottery_ticket_hypothesis(step_replay: bool | str) -> None:
    ours, plain = fit_both(
        WithoutBatchNorm,
        config=XLAConfig(step_replay=step_replay),
        max_epochs=4,
        callbacks=lambda: [PruningOfCopies("l1_unstructured", amount=0.3)],
    )
    assert_same_weights(ours, plain)
    # Pruning is made permanent as the fit ends.
    assert any(bool((value == 0).any()) for name, value in ours.module.named_parameters() if name.endswith("weight"))


# ---- averages of weights ------------------------------------------------------------------------


def test_stochastic_weight_averaging() -> None:
    ours, plain = fit_both(
        WithoutBatchNorm,
        max_epochs=4,
        callbacks=lambda: [StochasticWeightAveraging(swa_lrs=5e-3, swa_epoch_start=1, annealing_epochs=1)],
    )
    assert_same_weights(ours, plain)
    assert_counts(ours, executions=24)


def test_stochastic_weight_averaging_with_batch_norm() -> None:
    ours, plain = fit_both(
        Classifier,
        max_epochs=4,
        callbacks=lambda: [StochasticWeightAveraging(swa_lrs=5e-3, swa_epoch_start=1, annealing_epochs=1)],
    )
    assert_same_weights(ours, plain)
    # The last epoch computes the norms' statistics for the averaged weights, without gradients; its last update has
    # no gradients to use.
    assert_counts(ours, compiles=3, executions=24 + 6)


averaging = pytest.mark.skipif(not hasattr(of_lightning, "WeightAveraging"), reason="came with Lightning 2.6")
_AVERAGES = [lambda: of_lightning.EMAWeightAveraging(decay=0.5), lambda: of_lightning.WeightAveraging()]


@averaging
@pytest.mark.parametrize("average", _AVERAGES, ids=["EMA", "mean"])
def test_weight_averaging(average: Callable[[], Any]) -> None:
    ours, plain = fit_both(Classifier, validation=loader, callbacks=lambda: [average()])
    assert_same_weights(ours, plain)
    name = "val_loss"
    assert_close([float(ours.trainer.callback_metrics[name])], [float(plain.trainer.callback_metrics[name])])
    # Graphs: training, validation and averaging. The average is updated after each batch but the first.
    assert_counts(ours, compiles=3, executions=12 + 12 + 11)


@averaging
@pytest.mark.parametrize("average", _AVERAGES, ids=["EMA", "mean"])
def test_weight_averaging_costs_one_execution_per_step_and_nothing_else(average: Callable[[], Any]) -> None:
    def costs(batches: int) -> tuple[int, int, int, int]:
        # Copies that remain from another fit would get buffers of their own here, and be counted.
        gc.collect()
        run = fit(
            Classifier,
            XLAEagerStrategy(XLAConfig(replay_verify_every=None)),
            data=lambda: loader(batches),
            max_epochs=1,
            callbacks=lambda: [average()],
        )
        counts = run.counters
        return counts.compiles, counts.executions, counts.transfers_to_host, counts.eager_ops

    for _ in range(2):
        costs(4)
    few, many = costs(4), costs(8)
    assert (few[0], many[0]) == (0, 0)
    assert tuple(more - less for less, more in zip(few[1:], many[1:], strict=True)) == (8, 0, 0)


@averaging
def test_weight_averaging_on_the_host() -> None:
    ours, plain = fit_both(Classifier, callbacks=lambda: [of_lightning.EMAWeightAveraging(device="cpu", decay=0.5)])
    assert_same_weights(ours, plain)
    assert_counts(ours)


# ---- monitors, bars and loggers -----------------------------------------------------------------


def test_monitors_cost_no_transfer_of_their_own(tmp_path: Path) -> None:
    def callbacks() -> list[Any]:
        return [LearningRateMonitor(), DeviceStatsMonitor()]

    due = more_transfers(logger=lambda: CSVLogger(tmp_path), log_every_n_steps=lambda: 3, callbacks=lambda: callbacks())
    assert due == 2


class Kept(DummyLogger):  # type: ignore[misc]
    """A logger that keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int | None, dict[str, Any]]] = []

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.rows.append((step, dict(metrics)))


def test_learning_rate_monitor_logs_the_rates_of_the_cpu() -> None:
    ours, plain = (
        fit(Scheduled, strategy, logger=Kept(), log_every_n_steps=2, callbacks=lambda: [LearningRateMonitor("step")])
        for strategy in (XLAEagerStrategy(), None)
    )
    rates, expected = (
        [(step, row["lr-AdamW"]) for step, row in run.trainer.logger.rows if "lr-AdamW" in row] for run in (ours, plain)
    )
    assert rates == expected
    assert len({rate for _, rate in rates}) == 6


def test_device_stats_monitor_logs_what_the_device_tells() -> None:
    run = fit(
        Classifier, XLAEagerStrategy(), logger=Kept(), log_every_n_steps=2, callbacks=lambda: [DeviceStatsMonitor()]
    )
    stats = XLAEagerAccelerator().get_device_stats(run.module.device)
    logged = [row for _, row in run.trainer.logger.rows if any("DeviceStatsMonitor" in name for name in row)]
    assert len(logged) == 2 * 6
    for row in logged:
        assert all(name.endswith(tuple(stats)) for name in row)
        assert all(value > 0 for value in row.values())


class Computes(Classifier):
    """Uses views, which are no operations of inference tensors on XLA."""

    flops_per_batch = 1000

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        assert not torch.is_grad_enabled()
        self.log("first", self.net(batch[0])[:, 0].mean())


def rows_and_first(batch: Any) -> int:
    return len(batch[0]) * int(batch[0][0].numel() > 0)


def test_throughput_monitor_needs_no_tpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def asks(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("it asks which TPU this is")

    monkeypatch.setattr("torch_xla._internal.tpu.get_tpu_env", asks)
    ours, plain = (
        fit(
            Computes,
            strategy,
            validation=loader,
            logger=Kept(),
            log_every_n_steps=2,
            callbacks=lambda: [ThroughputMonitor(rows_and_first, length_fn=rows_and_first, window_size=3)],
        )
        for strategy in (XLAEagerStrategy(), None)
    )
    mine, theirs = (
        [(step, sorted(name for name in row if not name.startswith("xla/"))) for step, row in run.trainer.logger.rows]
        for run in (ours, plain)
    )
    assert mine == theirs
    last = [row for _, row in ours.trainer.logger.rows if "train/device/samples_per_sec" in row][-1]
    assert last["train/device/samples_per_sec"] > 0
    assert "train/device/mfu" not in last

    fabric = L.Fabric(strategy=XLAEagerFabricStrategy())
    fabric.launch()
    assert FabricThroughputMonitor(fabric).available_flops is None


def test_throughput_monitor_takes_the_flops_of_a_function_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    module = "lightning.pytorch.callbacks.throughput_monitor"
    monkeypatch.setattr(f"{module}.get_available_flops", lambda device, dtype: 123)
    monitor = ThroughputMonitor(rows_and_first)
    fit(Computes, XLAEagerStrategy(), logger=Kept(), callbacks=lambda: [monitor], max_steps=1)
    assert monitor.available_flops == 123


def test_inference_mode_of_ones_own_makes_no_inference_tensors() -> None:
    class Looks(Computes):
        @torch.inference_mode()
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            assert not torch.is_grad_enabled()
            with torch.inference_mode(False):
                assert torch.is_grad_enabled()
            self.kept.append(self.net(batch[0])[0].sum())

    fit_both(Looks, validation=loader, max_epochs=1)
    assert (torch.ones(2) * 2).is_inference() is False
    with torch.inference_mode():
        assert (torch.ones(2) * 2).is_inference()


def test_a_cpu_counts_as_no_tpu() -> None:
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addHandler(handler)
    run = trainer(XLAEagerStrategy())
    assert "TPU available: False, using: 0 TPU cores" in messages
    assert not any("not used" in message for message in messages)
    assert (run.num_devices, run.strategy.root_device.type) == (1, "xla")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(xla_adapters.get_runtime().device), "hardware", lambda self: "TPU")
        trainer(XLAEagerStrategy())
    assert "TPU available: False, using: 1 TPU cores" in messages


def test_checkpoint_on_exception_holds_the_state_before_the_step_that_failed(tmp_path: Path) -> None:
    class Fails(Classifier):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            if self.trainer.global_step == 3:
                raise ValueError("the test's own")

    module = Fails()
    run = trainer(XLAEagerStrategy(), callbacks=[OnExceptionCheckpoint(tmp_path, "crash")])
    with pytest.raises(ValueError, match="the test's own"):
        run.fit(module, loader())
    saved = torch.load(tmp_path / "crash.ckpt", weights_only=False)
    assert saved["global_step"] == 3
    resumed = trainer(None, max_epochs=1)
    resumed.fit(Classifier(), loader(), ckpt_path=tmp_path / "crash.ckpt", **ANYTHING)
    assert resumed.global_step == 6


@pytest.mark.parametrize(("refresh_rate", "due"), [(1, 6), (3, 2), (100, 0)])
def test_progress_bar_costs_one_transfer_per_redraw(refresh_rate: int, due: int) -> None:
    assert more_transfers(enable_progress_bar=lambda: True, callbacks=lambda: [TQDMProgressBar(refresh_rate)]) == due


@pytest.mark.parametrize(("every", "due"), [(3, 2), (100, 0)])
def test_all_loggers_together_cost_one_transfer_when_due(every: int, due: int, tmp_path: Path) -> None:
    def loggers() -> list[Logger]:
        return [CSVLogger(tmp_path), TensorBoardLogger(tmp_path)]

    assert more_transfers(logger=loggers, log_every_n_steps=lambda: every) == due


@pytest.mark.parametrize(("refresh_rate", "due"), [(1, 6), (3, 2)])
def test_bar_and_loggers_share_a_transfer(refresh_rate: int, due: int, tmp_path: Path) -> None:
    shared = more_transfers(
        logger=lambda: [CSVLogger(tmp_path), TensorBoardLogger(tmp_path)],
        log_every_n_steps=lambda: 3,
        enable_progress_bar=lambda: True,
        callbacks=lambda: [TQDMProgressBar(refresh_rate)],
    )
    assert shared == due


def test_loggers_write_the_values_of_the_cpu(tmp_path: Path) -> None:
    written = []
    for side, strategy in (("xla", XLAEagerStrategy()), ("cpu", None)):
        fit(Shown, strategy, logger=CSVLogger(tmp_path, version=side), log_every_n_steps=2)
        rows = logged(tmp_path / "lightning_logs" / side)
        written.append([(int(row["step"]), float(row["loss"]), float(row["twice"])) for row in rows])
    ours, plain = written
    assert [row[0] for row in ours] == [row[0] for row in plain] == [1, 3, 5, 7, 9, 11]
    assert_close([value for row in ours for value in row[1:]], [value for row in plain for value in row[1:]], 4e-6)


# ---- profilers --------------------------------------------------------------------------------------


class Manual(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return {"loss": loss}


# For each loop the module, options of the Trainer, and the number of graphs.
_LOOPS: dict[str, tuple[type[Classifier], dict[str, Any], int]] = {
    "plain": (Classifier, {}, 1),
    "accumulating": (Classifier, {"accumulate_grad_batches": 2}, 2),
    "manual": (Manual, {}, 1),
}


def profiled(loop: str, profiler: Profiler) -> Any:
    """Fits with a profiler, with the losses of the CPU and the number of executions of a fit without a profiler."""
    make, options, graphs = _LOOPS[loop]
    ours = fit(make, XLAEagerStrategy(), max_epochs=1, profiler=profiler, **options)
    plain = fit(make, None, max_epochs=1, **options)
    assert_close(ours.module.losses, plain.module.losses)
    assert ours.counters.compiles == graphs, ours.compiles
    assert ours.counters.executions == 6
    return ours


@pytest.mark.parametrize("loop", sorted(_LOOPS))
def test_simple_profiler_times_every_batch(loop: str) -> None:
    profiler = SimpleProfiler()
    profiled(loop, profiler)
    assert len(profiler.recorded_durations["run_training_batch"]) == 6
    assert len(profiler.recorded_durations["[Strategy]XLAEagerStrategy.training_step"]) == 6


@pytest.mark.parametrize("loop", sorted(_LOOPS))
def test_advanced_profiler_reports_the_training_step(loop: str, tmp_path: Path) -> None:
    profiled(loop, AdvancedProfiler(dirpath=tmp_path, filename="report"))
    (report,) = tmp_path.iterdir()
    assert "Profile stats for: [Strategy]XLAEagerStrategy.training_step" in report.read_text()


@pytest.mark.parametrize("loop", sorted(_LOOPS))
def test_xla_profiler_traces_the_training_step(loop: str) -> None:
    # The system chooses a port that is free.
    profiler = XLAProfiler(port=0)
    profiled(loop, profiler)
    assert profiler._start_trace
    assert not profiler._recording_map


# ---- averages where no user code looks at gradients -------------------------------------------------


class _Net(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, CLASSES))

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _trained(strategy: Any) -> list[torch.Tensor]:
    module = _Net()
    average = StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=2, annealing_epochs=1)
    trainer(strategy, max_epochs=4, callbacks=[average]).fit(module, loader(4))
    return [value.detach().cpu().float() for value in module.state_dict().values()]


def test_the_update_after_its_last_epoch_has_the_gradients_of_the_batch_before() -> None:
    expected = _trained(None)
    for one, other in zip(_trained(XLAEagerStrategy()), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
