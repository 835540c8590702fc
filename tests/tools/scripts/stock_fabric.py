"""Trains a classifier with Fabric, with the strategy of this package and marked steps."""

import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_strategy import XLAEagerFabricStrategy


def main():
    fabric = L.Fabric(strategy=XLAEagerFabricStrategy())
    fabric.launch()
    fabric.seed_everything(1)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(16, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = fabric.setup(model, optimizer)
    data = TensorDataset(torch.randn(64, 8), torch.randint(0, 3, (64,)))
    loader = fabric.setup_dataloaders(DataLoader(data, batch_size=8))
    model.train()
    for epoch in range(2):
        for inputs, target in loader:
            with fabric.strategy.step():
                loss = torch.nn.functional.cross_entropy(model(inputs), target)
                fabric.backward(loss)
                fabric.clip_gradients(model, optimizer, max_norm=1.0)
                optimizer.step()
                optimizer.zero_grad()
        fabric.print(f"epoch {epoch}: {loss.item():.3f}")
    fabric.save("model.ckpt", {"model": model})


if __name__ == "__main__":
    main()
