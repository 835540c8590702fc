"""`LightningCLI` chooses the strategy by its name, by its class with options, and from its own saved configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.cli import LightningCLI

import xla_adapters
from lightning_strategy import XLAEagerStrategy
from tests.isolation import isolated
from tests.lightning_strategy.scenarios import Classifier, assert_close, loader


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


@isolated
def test_strategy_by_name(tmp_path: Path) -> None:
    assert_one_graph_per_step(tmp_path, "--trainer.strategy=xla_eager")


@isolated
def test_strategy_by_class_with_options(tmp_path: Path) -> None:
    ours = assert_one_graph_per_step(
        tmp_path, "--trainer.strategy=lightning_strategy.XLAEagerStrategy", "--trainer.strategy.max_graphs=3"
    )
    assert ours.trainer.strategy.xla_config.max_graphs == 3


@isolated
def test_saved_configuration_trains_again(tmp_path: Path) -> None:
    first = fit_by_command_line(tmp_path / "first", "--trainer.strategy=xla_eager")
    saved = tmp_path / "first" / "config.yaml"
    assert "strategy: xla_eager" in saved.read_text()
    again = fit_by_command_line(tmp_path / "again", f"--config={saved}")
    assert isinstance(again.trainer.strategy, XLAEagerStrategy)
    assert again.model.losses == first.model.losses


@isolated
def test_unknown_option_of_the_strategy_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        fit_by_command_line(
            tmp_path, "--trainer.strategy=lightning_strategy.XLAEagerStrategy", "--trainer.strategy.no_such_option=3"
        )
