"""LightningModules as Lightning's documentation introduces them: models, data modules, metrics, schedules."""

from __future__ import annotations

import math
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
import torchmetrics
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader

from tests.programs import data
from tests.programs.program import Fit

_BATCH = 16


class LitAutoEncoder(L.LightningModule):
    """Two small networks that hand a picture through a narrow place."""

    def __init__(self, encoder: nn.Module, decoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder
        self.decoder = decoder

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, _ = batch
        x = x.view(x.size(0), -1)
        z = self.encoder(x)
        x_hat = self.decoder(z)
        loss = F.mse_loss(x_hat, x)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def autoencoder(fit: Fit) -> None:
    encoder = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 3))
    decoder = nn.Sequential(nn.Linear(3, 32), nn.ReLU(), nn.Linear(32, 64))
    fit(LitAutoEncoder(encoder, decoder), DataLoader(data.digits(16 * _BATCH), batch_size=_BATCH), max_epochs=1)


class DigitsData(L.LightningDataModule):
    """The digits, some of them held out."""

    def __init__(self, batch_size: int = _BATCH) -> None:
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage: str) -> None:
        self.train_set = data.digits(8 * self.batch_size)
        self.val_set = data.digits(2 * self.batch_size, skip=8 * self.batch_size)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.train_set, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.val_set, batch_size=self.batch_size)


class LitClassifier(L.LightningModule):
    """A classifier that logs metrics of torchmetrics in training and validation."""

    def __init__(self, hidden: int = 32, learning_rate: float = 1e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 10))
        self.train_accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=10)
        self.val_accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.layers(x)
        return logits

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        logits = self(x)
        loss = F.cross_entropy(logits, y)
        self.train_accuracy(logits, y)
        self.log("train_loss", loss, prog_bar=True)
        self.log("train_accuracy", self.train_accuracy, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        logits = self(x)
        self.val_accuracy(logits, y)
        self.log("val_loss", F.cross_entropy(logits, y))
        self.log("val_accuracy", self.val_accuracy)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.hparams["learning_rate"])


def digits_classifier(fit: Fit) -> None:
    callbacks = [EarlyStopping("val_loss", patience=3), ModelCheckpoint(monitor="val_loss")]
    fit(LitClassifier(), DigitsData(), callbacks=callbacks, enable_checkpointing=True, max_epochs=2)


class LitOneCycle(LitClassifier):
    """The rate goes up and down again, step by step."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams["learning_rate"])
        scheduler = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=1e-2, total_steps=int(self.trainer.estimated_stepping_batches)
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def one_cycle(fit: Fit) -> None:
    fit(LitOneCycle(), DigitsData(), callbacks=[LearningRateMonitor("step")], max_epochs=2, gradient_clip_val=0.5)


class LitTransfer(L.LightningModule):
    """A backbone that stays as it is, and a head that learns."""

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self.feature_extractor = backbone
        self.feature_extractor.eval()
        for parameter in self.feature_extractor.parameters():
            parameter.requires_grad = False
        self.classifier = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.feature_extractor.eval()
        with torch.no_grad():
            representations = self.feature_extractor(x).flatten(1)
        logits: torch.Tensor = self.classifier(representations)
        return logits

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.classifier.parameters(), lr=1e-2)


def transfer(fit: Fit) -> None:
    backbone = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Dropout(0.1), nn.AdaptiveAvgPool2d(1)
    )
    fit(LitTransfer(backbone), DataLoader(data.digits(16 * _BATCH), batch_size=_BATCH), max_epochs=1)


class PositionalEncoding(nn.Module):
    """Adds sines of the position."""

    pe: torch.Tensor

    def __init__(self, width: int, length: int = 64) -> None:
        super().__init__()
        position = torch.arange(length).unsqueeze(1)
        rates = torch.exp(torch.arange(0, width, 2) * (-math.log(10_000.0) / width))
        table = torch.zeros(1, length, width)
        table[0, :, 0::2] = torch.sin(position * rates)
        table[0, :, 1::2] = torch.cos(position * rates)
        self.register_buffer("pe", table, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.pe[:, : x.size(1)]


class LitTransformer(L.LightningModule):
    """A causal language model of torch's own layers."""

    def __init__(self, vocabulary: int, width: int = 16) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.embedding = nn.Embedding(vocabulary, width)
        self.position = PositionalEncoding(width)
        layer = nn.TransformerEncoderLayer(width, 2, 2 * width, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.size(1), device=tokens.device)
        x = self.position(self.embedding(tokens) * math.sqrt(self.hparams["width"]))
        logits: torch.Tensor = self.head(self.encoder(x, mask=mask, is_causal=True))
        return logits

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        tokens = batch["input_ids"]
        logits = self(tokens[:, :-1])
        loss = F.cross_entropy(logits.reshape(-1, logits.size(-1)), tokens[:, 1:].reshape(-1))
        self.log("train_loss", loss)
        self.log("perplexity", loss.exp())
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.95)
        return [optimizer], [scheduler]


def transformer_lm(fit: Fit) -> None:
    loader: DataLoader[Any] = DataLoader(
        data.language(96).with_format("torch"),  # type: ignore[arg-type]
        batch_size=4,
        shuffle=True,
    )
    fit(
        LitTransformer(data.VOCABULARY),
        loader,
        max_epochs=1,
        accumulate_grad_batches=2,
        gradient_clip_val=0.25,
        gradient_clip_algorithm="norm",
    )
