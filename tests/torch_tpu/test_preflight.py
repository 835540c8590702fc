"""A pre-flight on TorchTPU, which has no tensors without memory, is refused before anything is traced."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import lightning.pytorch as pl
import pytest
from torch.utils.data import DataLoader

import hf_trainer
from lightning_strategy import XLAEagerStrategy
from tests.isolation import isolated
from tests.torch_tpu.models import arguments, gpt2, texts
from xla_adapters import cli
from xla_adapters.errors import UnsupportedOptionError

_REFUSED = "traced for TPUs that are not there with torch_xla only"


def _of_a_trainer(folder: Path) -> object:
    trainer = hf_trainer.Trainer(model=gpt2(), args=arguments(folder), train_dataset=texts(8))
    return trainer.preflight("v5e:1x1")


def _of_a_strategy(folder: Path) -> object:
    strategy = XLAEagerStrategy()
    trainer = pl.Trainer(strategy=strategy, max_steps=1, logger=False, default_root_dir=folder)
    return strategy.preflight(trainer, pl.LightningModule(), DataLoader(texts(8)), topology="v5e:1x1")


@pytest.mark.parametrize("preflight", [_of_a_trainer, _of_a_strategy])
@isolated
def test_of_a_training_that_is_set_up(preflight: Callable[[Path], object], tmp_path: Path) -> None:
    with pytest.raises(UnsupportedOptionError, match=_REFUSED):
        preflight(tmp_path)


@pytest.mark.parametrize("what", [(__file__,), ("--model", "config.json", "--batch", "8x16")])
@isolated
def test_of_the_command(what: tuple[str, ...], capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["preflight", "--topology", "v5e:1x1", *what]) == 2
    assert _REFUSED in capfd.readouterr().err
