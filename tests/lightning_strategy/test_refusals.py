"""What is refused, and the command line."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import yaml
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.strategies import Strategy

import xla_adapters
from lightning_strategy import XLAEagerStrategy
from tests.device import DEVICE
from tests.isolation import isolated
from tests.lightning_strategy.scenarios import Classifier, assert_close, fit, loader
from tests.lightning_strategy.scenarios import trainer as make_trainer
from xla_adapters import XLAConfig
from xla_adapters.errors import ConfigError, RuntimeOrderError, UnsupportedOptionError

pytestmark = pytest.mark.isolated


def given(how: str) -> Any:
    """The strategy as the user gives it to the Trainer: an instance, or its name."""
    return XLAEagerStrategy() if how == "instance" else "xla_eager"


both_ways = pytest.mark.parametrize("how", ["instance", "name"])


# ---- refused -----------------------------------------------------------------------------------


@both_ways
@pytest.mark.parametrize(
    ("options", "fix"),
    [
        ({"devices": 2}, "devices=2.*leave devices out"),
        ({"num_nodes": 2}, "num_nodes=2.*one process on one node"),
        ({"precision": "16-mixed"}, "precision='16-mixed'.*gradient scaler.*use precision='bf16-mixed'"),
        ({"precision": 16}, "precision=16.*use precision='bf16-mixed'"),
        ({"precision": "64-true"}, "precision='64-true'.*use precision='32-true'"),
    ],
)
def test_argument_of_the_trainer(options: dict[str, Any], fix: str, how: str) -> None:
    xla_adapters.initialize()
    with pytest.raises(UnsupportedOptionError, match=fix):
        make_trainer(given(how), **options)


# For a strategy by name Lightning looks for a GPU before it asks the strategy.
def test_another_device_than_the_process_has() -> None:
    with pytest.raises(UnsupportedOptionError, match=r"accelerator='gpu'.* CPU .*Leave accelerator out"):
        make_trainer(XLAEagerStrategy(), accelerator="gpu")
    with pytest.raises(UnsupportedOptionError, match=r"devices=\[0, 1\].*leave devices out"):
        make_trainer(XLAEagerStrategy(), devices=[0, 1])


def test_precision_given_twice_and_differently() -> None:
    with pytest.raises(ConfigError, match="'bf16-true' to the strategy and 'bf16-mixed' beside it; give it once"):
        make_trainer(XLAEagerStrategy(precision="bf16-true"), precision="bf16-mixed")
    same = make_trainer(XLAEagerStrategy(precision="bf16-true"), precision="bf16-true")
    assert same.precision == "bf16-true"


def test_options_of_the_strategy() -> None:
    def refused(match: str, *args: Any, **options: Any) -> None:
        with pytest.raises(ConfigError, match=match):
            XLAEagerStrategy(*args, **options)

    refused("xla_mode='turbo'.*valid values: 'eager', 'eager.compile', 'eager.dynamo', 'lazy'", xla_mode="turbo")
    refused("given twice: as an XLAConfig and as max_graphs=", XLAConfig(), max_graphs=3)
    refused("steps_per_execution is no longer an option", steps_per_execution=2)
    refused("unknown option.s. colour; valid options: xla_mode, on_graph_break", colour="red")
    refused("accumulation='unrolled' needs xla_mode='eager.compile'", xla_mode="lazy", accumulation="unrolled")
    refused("precision='16-mixed'.*use precision='bf16-mixed'", precision="16-mixed")
    refused("precision='int8'.*valid values: '32-true', 'bf16-true', 'bf16-mixed'", precision="int8")


def test_options_on_the_command_line_of_lightning() -> None:
    jsonargparse = pytest.importorskip("jsonargparse")
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("--strategy", type=Strategy)
    given = {"xla_mode": "eager", "max_graphs": "null", "profile_folder": "null", "xla_report": "false"}
    line = [f"--strategy.{name}={value}" for name, value in given.items()]
    parsed = parser.parse_args(["--strategy=lightning_strategy.XLAEagerStrategy", *line])
    assert parser.instantiate(parsed).strategy.xla_config == XLAConfig(xla_mode="eager")


def test_sharding_comes_before_anything_on_the_device() -> None:
    torch.ones(1).to(DEVICE)
    xla_adapters.initialize()
    for option in ({"auto_sharding": True}, {"sharding": "dp"}):
        with pytest.raises(RuntimeOrderError, match=r"after the XLA runtime had started.*Create this strategy first"):
            XLAEagerStrategy(**option)


@both_ways
@isolated(env={"CPU_NUM_DEVICES": "2"})
def test_a_process_under_spmd(how: str) -> None:
    xla_adapters.initialize(spmd=True)
    with pytest.raises(
        RuntimeOrderError, match=r"under SPMD.*Give it auto_sharding=True or sharding=.*in a process of its own"
    ):
        make_trainer(given(how))


class FitsAnother(L.Callback):
    """Fits another module at the end of the first epoch."""

    def __init__(self, strategy: XLAEagerStrategy) -> None:
        self.strategy = strategy
        self.inner = Classifier()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == 0:
            make_trainer(self.strategy, max_epochs=1).fit(self.inner, loader())


def test_a_run_inside_another_run() -> None:
    inner = FitsAnother(XLAEagerStrategy(xla_mode="lazy"))
    with pytest.raises(ConfigError, match=r"xla_mode='eager.compile' there and 'lazy' here.*same settings"):
        fit(Classifier, XLAEagerStrategy(), callbacks=lambda: [inner])
    assert inner.inner.losses == []
    alike = FitsAnother(XLAEagerStrategy())
    plain = fit(Classifier)
    outer = fit(Classifier, XLAEagerStrategy(), callbacks=lambda: [alike])
    assert outer.counters.executions == 12 + 6
    assert len(alike.inner.losses) == 6
    assert_close(outer.module.losses, plain.module.losses)


def test_anomalies_are_looked_for_in_eager_mode() -> None:
    plain = fit(Classifier, max_epochs=1).module.losses
    with pytest.warns(UserWarning, match=r"detect_anomaly=True reads.*as with xla_mode='eager'"):
        ours = fit(Classifier, XLAEagerStrategy(), detect_anomaly=True, max_epochs=1)
    assert_close(ours.module.losses, plain)
    eager = fit(Classifier, XLAEagerStrategy(xla_mode="eager"), detect_anomaly=True, max_epochs=1)
    assert_close(eager.module.losses, plain)
    with pytest.raises(UnsupportedOptionError, match=r"detect_anomaly=True reads.*but step_replay=True"):
        fit(Classifier, XLAEagerStrategy(step_replay=True), detect_anomaly=True)


class Undefined(Classifier):
    def loss(self, batch: Any) -> torch.Tensor:
        # The gradient is zero times infinity.
        return super().loss(batch) + (0 * self.net(batch[0]).sum()).sqrt()


def test_an_anomaly_is_found() -> None:
    with (
        pytest.warns(UserWarning, match="Error detected in .*Backward0. Traceback of forward call"),
        pytest.raises(RuntimeError, match="Backward0' returned nan values"),
    ):
        fit(Undefined, XLAEagerStrategy(), detect_anomaly=True)


def test_fused_optimizer() -> None:
    def make() -> Classifier:
        return Classifier(optimizer=lambda p: torch.optim.AdamW(p, fused=True))

    with pytest.raises(UnsupportedOptionError, match=r"fused=True.*Leave it out"):
        fit(make, XLAEagerStrategy())


class Manual(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        loss = self.loss(batch)
        self.kept.append(loss.detach())
        self.manual_backward(loss)
        optimizer.step()
        optimizer.zero_grad()


def test_manual_optimization_decides_itself_about_steps_and_gradients() -> None:
    for options, match in (
        ({"accumulation": "unrolled"}, "manual optimization.*leave the option out"),
        ({"free_grads": True}, "manual optimization.*optimizer.zero_grad"),
    ):
        with pytest.raises(UnsupportedOptionError, match=match):
            fit(Manual, XLAEagerStrategy(**options))
    ours = fit(Manual, XLAEagerStrategy())
    assert (ours.counters.compiles, ours.counters.executions) == (1, 12)
    assert_close(ours.module.losses, fit(Manual).module.losses)


# ---- in effect ---------------------------------------------------------------------------------


def test_accelerator_cpu_is_the_pjrt_device_of_the_process() -> None:
    ours = fit(Classifier, XLAEagerStrategy(), accelerator="cpu", devices=1)
    assert ours.trainer.strategy.root_device.type == DEVICE
    assert (ours.counters.compiles, ours.counters.executions) == (1, 12)
    assert_close(ours.module.losses, fit(Classifier).module.losses)


class LooksAtDtypes(L.Callback):
    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        self.weights = {parameter.dtype for parameter in pl_module.parameters()}
        self.environment = dict(os.environ)


@both_ways
@pytest.mark.parametrize(("precision", "weights"), [("bf16-mixed", torch.float32), ("bf16-true", torch.bfloat16)])
def test_bfloat16_by_the_argument_of_the_trainer(precision: Any, weights: torch.dtype, how: str) -> None:
    looks = LooksAtDtypes()
    ours = fit(Classifier, given(how), precision=precision, callbacks=lambda: [looks])
    assert (ours.counters.compiles, ours.counters.executions) == (1, 12), ours.compiles
    assert looks.weights == {weights}
    assert "XLA_USE_BF16" not in looks.environment
    plain = fit(Classifier, precision=precision)
    assert_close(ours.module.losses, plain.module.losses, 0.02)
    full = fit(Classifier, given(how))
    assert ours.module.losses != full.module.losses


# In lazy mode the operations around the 12 steps are graphs, too.
@pytest.mark.parametrize(
    ("mode", "compiles", "executions"), [("eager", 0, 0), ("lazy", 4, 16), ("eager+dynamo", 1, 12)]
)
def test_other_modes_train_alike(mode: Any, compiles: int, executions: int) -> None:
    ours = fit(Classifier, XLAEagerStrategy(xla_mode=mode))
    assert_close(ours.module.losses, fit(Classifier).module.losses)
    assert (ours.counters.compiles, ours.counters.executions) == (compiles, executions), ours.compiles


def test_unrolled_accumulation_executes_once_per_optimizer_step() -> None:
    ours = fit(Classifier, XLAEagerStrategy(accumulation="unrolled"), accumulate_grad_batches=3)
    assert ours.trainer.global_step == ours.counters.executions == 4
    assert ours.counters.compiles == 1
    assert_close(ours.module.losses, fit(Classifier, accumulate_grad_batches=3).module.losses)


# ---- command line -----------------------------------------------------------------------------------


class Module(Classifier):
    """A module that a command line can construct."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__(dropout=dropout)


class Data(L.LightningDataModule):
    def __init__(self, batches: int = 4) -> None:
        super().__init__()
        self.batches = batches

    def train_dataloader(self) -> Any:
        return loader(self.batches)


def fit_by_command_line(folder: Path, *arguments: str) -> Any:
    quiet = [
        "--trainer.logger=false",
        "--trainer.enable_checkpointing=false",
        "--trainer.enable_progress_bar=false",
        "--trainer.enable_model_summary=false",
        "--trainer.max_epochs=2",
        f"--trainer.default_root_dir={folder}",
    ]
    return LightningCLI(
        Module,
        Data,
        seed_everything_default=7,
        save_config_kwargs={"overwrite": True},
        args=["fit", *quiet, *arguments],
    )


def assert_one_graph_per_step(folder: Path, *arguments: str) -> Any:
    """The command line trains on XLA, with the losses of the CPU."""
    xla_adapters.initialize(eager=False)
    # The self-test of replay compiles graphs of its own, once in a process.
    assert xla_adapters.get_runtime().replay_works
    with xla_adapters.count() as counters:
        ours = fit_by_command_line(folder, *arguments)
    plain = fit_by_command_line(folder / "plain", "--trainer.accelerator=cpu")
    assert isinstance(ours.trainer.strategy, XLAEagerStrategy)
    assert_close(ours.model.losses, plain.model.losses)
    assert (counters.compiles, counters.executions) == (1, 8)
    return ours


def test_strategy_by_name(tmp_path: Path) -> None:
    assert_one_graph_per_step(tmp_path, "--trainer.strategy=xla_eager")


def test_strategy_by_class_with_options(tmp_path: Path) -> None:
    ours = assert_one_graph_per_step(
        tmp_path, "--trainer.strategy=lightning_strategy.XLAEagerStrategy", "--trainer.strategy.max_graphs=3"
    )
    assert ours.trainer.strategy.xla_config.max_graphs == 3


def test_strategy_by_class_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "train.yaml"
    strategy = {"class_path": "lightning_strategy.XLAEagerStrategy", "init_args": {"max_graphs": 3}}
    file.write_text(yaml.safe_dump({"trainer": {"strategy": strategy}}))
    assert assert_one_graph_per_step(tmp_path, f"--config={file}").trainer.strategy.xla_config.max_graphs == 3


def test_saved_configuration_trains_again(tmp_path: Path) -> None:
    first = fit_by_command_line(tmp_path / "first", "--trainer.strategy=xla_eager")
    saved = tmp_path / "first" / "config.yaml"
    assert "strategy: xla_eager" in saved.read_text()
    again = fit_by_command_line(tmp_path / "again", f"--config={saved}")
    assert isinstance(again.trainer.strategy, XLAEagerStrategy)
    assert again.model.losses == first.model.losses


def test_unknown_option_of_the_strategy_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        fit_by_command_line(
            tmp_path, "--trainer.strategy=lightning_strategy.XLAEagerStrategy", "--trainer.strategy.no_such_option=3"
        )
