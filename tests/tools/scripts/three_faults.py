"""A loop with three faults: a read in the step, a Fourier transform, and a last batch that is smaller."""

import argparse

import torch
from torch.utils.data import DataLoader, Dataset

import xla_adapters


class Signals(Dataset):
    def __len__(self):
        return 70

    def __getitem__(self, index):
        return torch.sin(torch.arange(16) * (index + 1) / 10)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=1e-3)
    args = parser.parse_args()
    xla_adapters.initialize()
    model = torch.nn.Linear(16, 16).to("xla")
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    best = 1e9
    loader = DataLoader(Signals(), batch_size=8, num_workers=1)
    for batch in loader:
        with xla_adapters.step():
            hidden = model(batch.to("xla"))
            spectrum = torch.fft.rfft(hidden)
            loss = spectrum.abs().mean()
            best = min(best, loss.item())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    main()
