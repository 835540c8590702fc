"""LightningModules as tutorials go on: adversaries, averages, several losses, mixtures and warm-ups."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch import callbacks
from torch import nn
from torch.utils.data import DataLoader

from tests.programs import data
from tests.programs.program import Fit

_BATCH = 16


def _loader(batches: int = 16, **options: Any) -> DataLoader[Any]:
    return DataLoader(data.digits(batches * _BATCH, **options), batch_size=_BATCH, shuffle=True)


class LitGAN(L.LightningModule):
    """Two networks against each other, each with an optimizer that is stepped by hand."""

    def __init__(self, latent_dim: int = 8, lr: float = 2e-4, b1: float = 0.5, b2: float = 0.999) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.generator = nn.Sequential(
            nn.Linear(latent_dim, 32), nn.BatchNorm1d(32), nn.LeakyReLU(0.2), nn.Linear(32, 64), nn.Tanh()
        )
        self.discriminator = nn.Sequential(nn.Linear(64, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1), nn.Sigmoid())

    def adversarial_loss(self, y_hat: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.binary_cross_entropy(y_hat, y)

    def training_step(self, batch: Any) -> None:
        images, _ = batch
        optimizer_g, optimizer_d = self.optimizers()  # type: ignore[misc]
        z = torch.randn(images.shape[0], self.hparams["latent_dim"]).type_as(images)

        self.toggle_optimizer(optimizer_g)
        valid = torch.ones(images.size(0), 1).type_as(images)
        g_loss = self.adversarial_loss(self.discriminator(self.generator(z)), valid)
        self.log("g_loss", g_loss, prog_bar=True)
        self.manual_backward(g_loss)
        optimizer_g.step()
        optimizer_g.zero_grad()
        self.untoggle_optimizer(optimizer_g)

        self.toggle_optimizer(optimizer_d)
        real_loss = self.adversarial_loss(self.discriminator(images), valid)
        fake = torch.zeros(images.size(0), 1).type_as(images)
        fake_loss = self.adversarial_loss(self.discriminator(self.generator(z).detach()), fake)
        d_loss = (real_loss + fake_loss) / 2
        self.log("d_loss", d_loss, prog_bar=True)
        self.manual_backward(d_loss)
        optimizer_d.step()
        optimizer_d.zero_grad()
        self.untoggle_optimizer(optimizer_d)

    def configure_optimizers(self) -> Any:
        lr, betas = self.hparams["lr"], (self.hparams["b1"], self.hparams["b2"])
        opt_g = torch.optim.Adam(self.generator.parameters(), lr=lr, betas=betas)
        opt_d = torch.optim.Adam(self.discriminator.parameters(), lr=lr, betas=betas)
        return [opt_g, opt_d], []


def gan(fit: Fit) -> None:
    fit(LitGAN(), _loader(flat=True), max_epochs=1)


class LitConvNet(L.LightningModule):
    """A small network of convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(512, 10)
        )
        self.criterion = nn.CrossEntropyLoss(label_smoothing=0.1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        loss: torch.Tensor = self.criterion(self.net(x), y)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)


def averaged_weights(fit: Fit) -> None:
    fit(LitConvNet(), _loader(), callbacks=[callbacks.EMAWeightAveraging(decay=0.9)], max_epochs=1)


class LitMixup(LitConvNet):
    """Trains on mixtures of pictures that are flipped at random."""

    def __init__(self, alpha: float = 0.4) -> None:
        super().__init__()
        self.save_hyperparameters()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        flipped = torch.rand(x.size(0), 1, 1, 1, device=x.device) < 0.5
        x = torch.where(flipped, x.flip(-1), x) + 0.05 * torch.randn_like(x)
        share = torch.rand(1, device=x.device) * self.hparams["alpha"]
        order = torch.rand(x.size(0), device=x.device).argsort()
        logits = self.net((1 - share) * x + share * x[order])
        loss = ((1 - share) * self.criterion(logits, y) + share * self.criterion(logits, y[order])).sum()
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=2)]


def mixup(fit: Fit) -> None:
    fit(LitMixup(), _loader(8), max_epochs=2)


class LitSeveralLosses(L.LightningModule):
    """Reconstructs and classifies; the hyper-parameters weigh the losses."""

    def __init__(self, hidden: int = 16, class_weight: float = 1.0, sparse_weight: float = 1e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.encoder = nn.Sequential(nn.Linear(64, hidden), nn.ReLU())
        self.decoder = nn.Linear(hidden, 64)
        self.classifier = nn.Linear(hidden, 10)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        z = self.encoder(x)
        losses = {
            "reconstruction": F.mse_loss(self.decoder(z), x),
            "class": F.cross_entropy(self.classifier(z), y),
            "sparse": z.abs().mean(),
        }
        loss = losses["reconstruction"]
        loss = loss + self.hparams.class_weight * losses["class"]
        loss = loss + self.hparams.sparse_weight * losses["sparse"]
        self.log_dict({f"train/{name}": value for name, value in losses.items()})
        self.log("train/loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(
            [
                {"params": [*self.encoder.parameters(), *self.decoder.parameters()], "lr": 1e-3},
                {"params": self.classifier.parameters(), "lr": 1e-2},
            ]
        )


def several_losses(fit: Fit) -> None:
    fit(LitSeveralLosses(), _loader(8, flat=True), max_epochs=2, gradient_clip_val=1.0)


class LitVAE(L.LightningModule):
    """A variational autoencoder whose divergence counts for more with each epoch."""

    def __init__(self, latent: int = 4, warmup_epochs: int = 3) -> None:
        super().__init__()
        self.warmup_epochs = warmup_epochs
        self.encoder = nn.Sequential(nn.Linear(64, 32), nn.ReLU())
        self.mu = nn.Linear(32, latent)
        self.log_var = nn.Linear(32, latent)
        self.decoder = nn.Sequential(nn.Linear(latent, 32), nn.ReLU(), nn.Linear(32, 64), nn.Sigmoid())

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, _ = batch
        hidden = self.encoder(x)
        mu, log_var = self.mu(hidden), self.log_var(hidden)
        z = mu + torch.exp(0.5 * log_var) * torch.randn_like(mu)
        reconstruction = F.binary_cross_entropy(self.decoder(z), x, reduction="sum") / x.size(0)
        divergence = -0.5 * torch.sum(1 + log_var - mu.pow(2) - log_var.exp(), dim=1).mean()
        beta = min(1.0, self.current_epoch / self.warmup_epochs)
        loss = reconstruction + beta * divergence
        self.log_dict({"train_loss": loss, "kl": divergence, "beta": beta})
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def vae(fit: Fit) -> None:
    fit(LitVAE(), _loader(5, flat=True), max_epochs=3)
