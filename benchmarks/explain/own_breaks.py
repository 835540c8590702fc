"""Hand-written loops whose step has a break of its graph."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import torchmetrics

from benchmarks.explain.own_loops import BATCH, Net, batches, on_device, update
from benchmarks.explain.program import Program
from xla_adapters import CompiledStep, step


def third_party() -> None:
    model = Net().to("xla")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    running = torchmetrics.MeanMetric().to("xla")
    for x, y in on_device(4 * BATCH):
        with step():
            loss = F.cross_entropy(model(x), y)
            running.update(loss.detach())  # planted: .item() in a third-party call
            update(loss, optimizer)


def printed() -> None:
    model = Net().to("xla")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @CompiledStep
    def train_step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        print(f"loss {loss:.3f}")  # planted: print
        optimizer.step()
        return loss.detach()

    for x, y in batches(4 * BATCH):
        train_step(x, y)


def positions_of_mask() -> None:
    model = Net().to("xla")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in on_device(4 * BATCH):
        with step():
            losses = F.cross_entropy(model(x), y, reduction="none")
            rows = (losses > losses.mean()).nonzero().squeeze(1)  # planted: nonzero
            update(losses[rows].mean(), optimizer)


class SmoothGradient(torch.autograd.Function):
    """Hands its input on, and leaves the low frequencies of its gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        spectrum = torch.fft.rfft(gradients[0])  # planted: FFT in the backward only
        return torch.fft.irfft(spectrum[..., :3], n=gradients[0].shape[-1])


def smoothed_gradients() -> None:
    model = Net().to("xla")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in on_device(4 * BATCH):
        with step():
            x = SmoothGradient.apply(model.hidden(x))  # type: ignore[no-untyped-call]
            loss = F.cross_entropy(model.head(x), y)
            update(loss, optimizer)


_MATRIX = r"multiply by the matrix of the transform"
PROGRAMS = [
    Program(
        ".item() in a third-party call",
        third_party,
        r"^TensorReadError: tensor read .*bool\(tensor\)$",
        r"read it after the step",
    ),
    Program(
        "print",
        printed,
        r"^TensorReadError: tensor read .*(formatting|print)",
        r"read it after the step",
        loop="CompiledStep",
    ),
    Program("nonzero", positions_of_mask, r"^GraphBreakError: .*: nonzero$", r"torch\.where\(mask, x, 0\)"),
    Program("FFT in the backward only", smoothed_gradients, r"^HostOperatorError: .* _fft_r2c,", _MATRIX),
]
