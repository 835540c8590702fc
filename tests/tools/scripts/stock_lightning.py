"""Trains an autoencoder, as the first page of Lightning's documentation does."""

import argparse

import lightning as L
import torch
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from torch import nn, utils


class Digits(utils.data.Dataset):
    def __init__(self, samples):
        self.samples = samples

    def __len__(self):
        return self.samples

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return torch.randn(1, 8, 8, generator=generator), index % 10


class LitAutoEncoder(L.LightningModule):
    def __init__(self, lr=1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.encoder = nn.Sequential(nn.Linear(8 * 8, 16), nn.ReLU(), nn.Linear(16, 3))
        self.decoder = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 8 * 8))

    def training_step(self, batch, batch_idx):
        x, _ = batch
        x = x.view(x.size(0), -1)
        loss = nn.functional.mse_loss(self.decoder(self.encoder(x)), x)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, _ = batch
        x = x.view(x.size(0), -1)
        self.log("val_loss", nn.functional.mse_loss(self.decoder(self.encoder(x)), x))

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=self.hparams.lr)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class DataModule(L.LightningDataModule):
    def __init__(self, batch_size, workers):
        super().__init__()
        self.batch_size, self.workers = batch_size, workers

    def train_dataloader(self):
        return utils.data.DataLoader(
            Digits(64), batch_size=self.batch_size, shuffle=True, num_workers=self.workers, drop_last=True
        )

    def val_dataloader(self):
        return utils.data.DataLoader(Digits(16), batch_size=self.batch_size)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args()
    L.seed_everything(7)
    trainer = L.Trainer(
        max_epochs=args.epochs,
        accelerator="gpu" if torch.cuda.is_available() else "cpu",
        devices=1,
        gradient_clip_val=1.0,
        callbacks=[
            ModelCheckpoint(monitor="val_loss"),
            EarlyStopping("val_loss"),
            LearningRateMonitor("step"),
        ],
        log_every_n_steps=5,
    )
    trainer.fit(LitAutoEncoder(), datamodule=DataModule(args.batch_size, args.workers))
    trainer.test(LitAutoEncoder(), dataloaders=[])


if __name__ == "__main__":
    main()
