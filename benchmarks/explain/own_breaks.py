"""Hand-written loops whose step has a break of its graph."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import torchmetrics

from benchmarks.explain.own_loops import BATCH, Net, batches, eagerly
from benchmarks.explain.program import Program
from xla_adapters import CompiledStep, step


def third_party() -> None:
    model = Net().to("xla")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    running = torchmetrics.MeanMetric().to("xla")
    for x, y in batches(4 * BATCH):
        x, y = x.to("xla"), y.to("xla")
        with step():
            loss = F.cross_entropy(model(x), y)
            running.update(loss.detach())  # planted: .item() in a third-party call
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


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
    for x, y in batches(4 * BATCH):
        x, y = x.to("xla"), y.to("xla")
        with step():
            losses = F.cross_entropy(model(x), y, reduction="none")
            rows = (losses > losses.mean()).nonzero().squeeze(1)  # planted: nonzero
            losses[rows].mean().backward()
            optimizer.step()
            optimizer.zero_grad()


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
    for x, y in batches(4 * BATCH):
        x, y = x.to("xla"), y.to("xla")
        with step():
            x = SmoothGradient.apply(model.hidden(x))  # type: ignore[no-untyped-call]
            loss = F.cross_entropy(model.head(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


_MATRIX = r"multiply by the matrix of the transform"
PROGRAMS = [
    Program(
        name=".item() in a third-party call",
        loop="step()",
        run=eagerly(third_party),
        cause=r"^TensorReadError: tensor read .*bool\(tensor\)$",
        remedy=r"read it after the step",
    ),
    Program(
        name="print",
        loop="CompiledStep",
        run=eagerly(printed),
        cause=r"^TensorReadError: tensor read .*(formatting|print)",
        remedy=r"read it after the step",
    ),
    Program(
        name="nonzero",
        loop="step()",
        run=eagerly(positions_of_mask),
        cause=r"^GraphBreakError: .*: nonzero$",
        remedy=r"torch\.where\(mask, x, 0\)",
    ),
    Program(
        name="FFT in the backward only",
        loop="step()",
        run=eagerly(smoothed_gradients),
        cause=r"^HostOperatorError: .* _fft_r2c,",
        remedy=_MATRIX,
    ),
]
