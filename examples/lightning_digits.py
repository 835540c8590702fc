"""Trains a LightningModule on scikit-learn's handwritten digits to over 97% accuracy on held-out ones.

    python -m examples.lightning_digits                    # each step one XLA graph, on any PJRT device
    python -m examples.lightning_digits --strategy auto    # the same module without XLA

The exit code is 1 if the accuracy is not reached.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

import lightning_strategy  # noqa: F401 (gives Lightning the strategy "xla_eager")
import xla_adapters

WANTED = 0.97
_Batch = tuple[torch.Tensor, torch.Tensor]


class Digits(L.LightningDataModule):
    """1,797 images of 8 x 8 pixels from -1 to 1: 1,257 to train on, 270 to validate, 270 to test."""

    def __init__(self, batch_size: int = 64) -> None:
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage: str) -> None:
        images, labels = load_digits(return_X_y=True)
        train_images, rest, train_labels, rest_labels = train_test_split(
            images.reshape(-1, 1, 8, 8) / 8.0 - 1.0, labels, test_size=540, random_state=0, stratify=labels
        )
        halves = train_test_split(rest, rest_labels, test_size=270, random_state=0, stratify=rest_labels)
        self.train = _dataset(train_images, train_labels)
        self.val, self.test = _dataset(halves[0], halves[2]), _dataset(halves[1], halves[3])

    def train_dataloader(self) -> DataLoader[_Batch]:
        # Without drop_last the last, shorter batch would compile a second graph.
        return DataLoader(self.train, batch_size=self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader[_Batch]:
        return DataLoader(self.val, batch_size=90)

    def test_dataloader(self) -> DataLoader[_Batch]:
        return DataLoader(self.test, batch_size=90)


def _dataset(images: Any, labels: Any) -> Dataset[_Batch]:
    return TensorDataset(torch.as_tensor(images, dtype=torch.float32), torch.as_tensor(labels))


class DigitClassifier(L.LightningModule):
    """A small convolutional network; nothing in it knows of XLA."""

    def __init__(self, learning_rate: float = 4e-3, epochs: int = 30) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
            *(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Dropout(0.3), nn.Linear(32 * 16, 64), nn.ReLU(), nn.Linear(64, 10)),
        )
        self.train_accuracy, self.val_accuracy, self.test_accuracy = (
            MulticlassAccuracy(10, average="micro") for _ in range(3)
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.net(images)

    def training_step(self, batch: _Batch, batch_idx: int) -> torch.Tensor:
        return self._step("train", batch, self.train_accuracy)

    def validation_step(self, batch: _Batch, batch_idx: int) -> None:
        self._step("val", batch, self.val_accuracy)

    def test_step(self, batch: _Batch, batch_idx: int) -> None:
        self._step("test", batch, self.test_accuracy)

    def _step(self, name: str, batch: _Batch, accuracy: MulticlassAccuracy) -> torch.Tensor:
        images, labels = batch
        logits = self(images)
        loss = nn.functional.cross_entropy(logits, labels)
        accuracy(logits, labels)
        self.log(f"{name}_loss", loss, prog_bar=name != "test")
        self.log(f"{name}_accuracy", accuracy, on_step=False, on_epoch=True, prog_bar=name != "test")
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams["learning_rate"])
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.hparams["epochs"])
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "epoch"}}


def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Returns the accuracy on the test images, and what the training cost on the device."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--strategy", default="xla_eager", help="any of Lightning's names; auto is the plain CPU here")
    parser.add_argument("--output-dir", type=Path, default=None, help="for logs and checkpoints (a temporary folder)")
    options = parser.parse_args(arguments)
    uses_xla = options.strategy == "xla_eager"

    L.seed_everything(0)
    module, data = DigitClassifier(epochs=options.epochs), Digits()
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.output_dir or Path(scratch)
        best = ModelCheckpoint(folder / "checkpoints", monitor="val_accuracy", mode="max", save_last=True)
        trainer = L.Trainer(
            strategy=options.strategy,
            max_epochs=options.epochs,
            callbacks=[best, EarlyStopping("val_loss", patience=8), LearningRateMonitor("epoch")],
            logger=TensorBoardLogger(folder, name="digits"),
            log_every_n_steps=10,
            num_sanity_val_steps=0,
        )
        counting: AbstractContextManager[Any] = xla_adapters.count() if uses_xla else nullcontext()
        with counting as counted:
            trainer.fit(module, data)
        # With the best checkpoint, not the last weights.
        (metrics,) = trainer.test(module, data, ckpt_path=best.best_model_path)
    steps = trainer.global_step
    print(f"\naccuracy on held-out digits: {metrics['test_accuracy']:.1%} after {steps} steps")
    results = {"test_accuracy": metrics["test_accuracy"]}
    if uses_xla:
        validations = steps // trainer.num_training_batches
        executions_per_step = counted.executions / (steps + validations * sum(trainer.num_val_batches))
        results |= {"compiles": counted.compiles, "executions_per_step": executions_per_step}
        print(f"compiles of the fit: {counted.compiles}")
        print(f"executions per training or validation step: {executions_per_step:.4g}")
    return results


if __name__ == "__main__":
    sys.exit(0 if main()["test_accuracy"] > WANTED else 1)
