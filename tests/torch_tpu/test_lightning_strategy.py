"""`XLAEagerStrategy` on TorchTPU."""

from __future__ import annotations

import functools
import os
import signal
from pathlib import Path
from typing import Any

import lightning as L
import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

from lightning_strategy import XLAEagerStrategy
from tests.isolation import isolated, outcome_of
from tests.torch_tpu import stand_in
from xla_adapters import XLAAdapterError


class Net(pl.LightningModule):
    """A classifier; notes its losses and, per batch, the calls of the plugin."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Dropout(dropout), torch.nn.Linear(16, 4)
        )
        self.losses: list[torch.Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        inputs, classes = batch
        loss = torch.nn.functional.cross_entropy(self.layers(inputs), classes)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        inputs, classes = batch
        self.log("val_loss", torch.nn.functional.cross_entropy(self.layers(inputs), classes))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8), "interval": "step"}]


class Losses(pl.Callback):
    """The losses, and the calls of the plugin from the begin of one batch to that of the next."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.counts: list[stand_in.Counts] = []
        self._before: stand_in.Counts | None = None

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        if trainer.strategy.root_device.type == "tpu":
            torch.accelerator.synchronize()
            if self._before is not None:
                self.counts.append(stand_in.counts().since(self._before))
            self._before = stand_in.counts()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *args: Any) -> None:
        self.losses.append(outputs["loss"].item())


def _data(*, shuffle: bool = False) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(64, 8, generator=generator)
    return DataLoader(
        TensorDataset(inputs, torch.randint(0, 4, (64,), generator=generator)), batch_size=8, shuffle=shuffle
    )


def _fit(folder: Path, **options: Any) -> tuple[Net, Losses, pl.Trainer]:
    noted, module = Losses(), Net()
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(
        max_epochs=1,
        default_root_dir=folder,
        gradient_clip_val=1.0,
        enable_model_summary=False,
        callbacks=[noted],
        **{**quiet, **options},
    )
    trainer.fit(module, _data(), _data())
    return module, noted, trainer


@isolated
@pytest.mark.parametrize("step_replay", ["auto", False])
def test_it_trains_as_the_cpu_does_in_one_launch_per_step(step_replay: Any, tmp_path: Path) -> None:
    reference, on_cpu, _ = _fit(tmp_path, accelerator="cpu")
    module, noted, trainer = _fit(tmp_path, strategy=XLAEagerStrategy(step_replay=step_replay))
    assert trainer.strategy.root_device == torch.device("tpu:0")
    torch.testing.assert_close(noted.losses, on_cpu.losses, rtol=0, atol=1e-5)
    for mine, other in zip(module.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine.detach().cpu(), other.detach().cpu(), rtol=0, atol=1e-5)
    assert {counts.executions for counts in noted.counts} == {1}
    # Of the first step, which finds no gradients; the others are the same program.
    assert sum(counts.compiles for counts in noted.counts) == 1
    assert trainer.callback_metrics["val_loss"].item() > 0


@isolated
def test_auto_takes_the_cpu_and_a_warning_says_so(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"strategy=lightning_strategy\.XLAEagerStrategy\(\) to train on it"):
        _, _, trainer = _fit(tmp_path)
    assert trainer.strategy.root_device == torch.device("cpu")
    with pytest.warns(UserWarning, match=r"strategy=lightning_strategy\.XLAEagerFabricStrategy\(\)"):
        L.Fabric()


@isolated
@pytest.mark.filterwarnings("error:accelerator='auto'")
def test_ours_by_name_is_no_choice_of_the_cpu(tmp_path: Path) -> None:
    assert pl.Trainer(strategy="xla_eager", logger=False).strategy.root_device == torch.device("tpu:0")
    pl.Trainer(accelerator="cpu", logger=False)


@isolated
@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"sharding": "fsdp"}, "torch_tpu"),
        ({"xla_mode": "lazy"}, "xla_mode='lazy'"),
    ],
)
def test_what_is_not_there_says_so(options: Any, named: str, tmp_path: Path) -> None:
    with pytest.raises(XLAAdapterError, match=named):
        _fit(tmp_path, strategy=XLAEagerStrategy(**options))


def _run(folder: Path, *, killed_at: int | None = None, resume: bool = False) -> tuple[list[float], Any]:
    class Killing(pl.Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
            if trainer.global_step == killed_at:
                os.kill(os.getpid(), signal.SIGKILL)

    saving = ModelCheckpoint(folder / "saved", every_n_train_steps=4, save_top_k=-1)
    noted, module = Losses(), Net(dropout=0.3)
    pl.seed_everything(0)
    trainer = pl.Trainer(
        max_epochs=2,
        strategy=XLAEagerStrategy(),
        callbacks=[saving, noted, Killing()],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    newest = max((folder / "saved").iterdir(), key=lambda path: path.stat().st_mtime) if resume else None
    trainer.fit(module, _data(shuffle=True), ckpt_path=newest)
    return noted.losses, {name: value.cpu().numpy() for name, value in module.state_dict().items()}


def test_a_fit_that_was_killed_resumes_exactly_under_dropout(tmp_path: Path) -> None:
    whole = outcome_of(functools.partial(_run, tmp_path / "whole"))
    assert whole.ok, whole.error
    killed = outcome_of(functools.partial(_run, tmp_path / "cut", killed_at=6))
    assert killed.error == f"the process died with signal {signal.SIGKILL.value}"
    resumed = outcome_of(functools.partial(_run, tmp_path / "cut", resume=True))
    assert resumed.ok, resumed.error
    (losses_whole, weights_whole), (losses, weights) = whole.value, resumed.value
    assert losses == losses_whole[4:]
    assert {name for name, value in weights.items() if not (value == weights_whole[name]).all()} == set()
