"""A loop of one's own, in a package: `python -m package.train`."""

import argparse

import torch
from torch.utils.data import DataLoader, Dataset

import xla_adapters

from .model import Net


class Images(Dataset):
    def __len__(self):
        return 48

    def __getitem__(self, index):
        return torch.randn(1, 8, 8), index % 10


def train_one_epoch(args, model, loader, optimizer, epoch):
    @xla_adapters.CompiledStep
    def train_step(images, labels):
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    model.train()
    for number, (images, labels) in enumerate(loader):
        loss = train_step(images.to("xla"), labels.to("xla"))
        if number % args.log_interval == 0:
            print(f"epoch {epoch}, batch {number}: {loss.item():.4f}")


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    right = 0
    for images, labels in loader:
        right += (model(images.to("xla")).argmax(1).cpu() == labels).sum().item()
    print("accuracy", right / len(loader.dataset))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--log-interval", type=int, default=2)
    args = parser.parse_args()
    xla_adapters.initialize()
    torch.manual_seed(0)
    model = Net(args.width).to("xla")
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    loader = DataLoader(Images(), batch_size=8, shuffle=True, num_workers=2)
    for epoch in range(args.epochs):
        train_one_epoch(args, model, loader, optimizer, epoch)
        evaluate(model, loader)
    torch.save(model.state_dict(), "model.pt")


if __name__ == "__main__":
    main()
