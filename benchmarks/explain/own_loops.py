"""Hand-written loops with one fault each, around `step()` or a `CompiledStep`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
import torchmetrics
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.explain.measure import Program
from xla_adapters import CompiledStep, step

BATCH, CLASSES = 8, 4


def batches(number: int) -> DataLoader[Any]:
    """Batches of random data; the last one has what is left."""
    return DataLoader(TensorDataset(torch.randn(number, 16), torch.arange(number) % CLASSES), batch_size=BATCH)


def on_device(number: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The same, moved."""
    for x, y in batches(number):
        yield x.to("xla"), y.to("xla")


class Net(nn.Module):
    """A small classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.dropout, self.head = nn.Linear(16, 16), nn.Dropout(0.1), nn.Linear(16, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.hidden(x))
        logits: torch.Tensor = self.head(self.dropout(hidden))
        return logits


def update(loss: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
    """Backward and update."""
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def shape_drift() -> None:
    images, captions = nn.Linear(16, 8).to("xla"), nn.Embedding(50, 8).to("xla")
    optimizer = torch.optim.AdamW([*images.parameters(), *captions.parameters()])

    @CompiledStep
    def train_step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        text = captions(batch["caption"]).mean(1)
        loss = 1 - F.cosine_similarity(images(batch["image"]), text).mean()
        update(loss, optimizer)
        return loss.detach()

    for longest in (12, 12, 12, 15, 12):
        train_step({"image": torch.randn(BATCH, 16), "caption": torch.randint(0, 50, (BATCH, longest))})


def box_counts() -> None:
    detector = nn.Linear(16, 4).to("xla")
    optimizer = torch.optim.SGD(detector.parameters(), lr=0.01)
    # The boxes of all pictures of a batch, one after the other, and how many each picture has.
    counts = [(3, 5), (3, 5), (3, 5), (4, 4)]
    for boxes_of in counts:
        features, boxes = torch.randn(8, 16).to("xla"), torch.rand(8, 4).to("xla")
        with step():
            losses = []
            predicted = detector(features)
            of_pictures = predicted.split(boxes_of)  # planted: box counts
            for mine, theirs in zip(of_pictures, boxes.split(boxes_of), strict=True):
                losses.append(F.smooth_l1_loss(mine, theirs))
            update(torch.stack(losses).mean(), optimizer)


def integer() -> None:
    model = Net().to("xla")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(3):
        hardest = 8 if epoch < 2 else 4
        for x, y in on_device(2 * BATCH):
            with step():
                losses = F.cross_entropy(model(x), y, reduction="none")
                loss = losses.topk(hardest).values.mean()  # planted: Python int
                update(loss, optimizer)


class WithPositions(nn.Module):
    """Reads a sequence piece by piece."""

    def __init__(self) -> None:
        super().__init__()
        self.positions, self.net, self.seen = nn.Parameter(torch.randn(64, 16)), Net(), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        positions = self.positions[self.seen : self.seen + len(x)]  # planted: counter in a module
        self.seen += len(x)
        logits: torch.Tensor = self.net(x + positions)
        return logits


def counter() -> None:
    model = WithPositions().to("xla")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @CompiledStep
    def train_step(x: torch.Tensor, y: torch.Tensor) -> None:
        update(F.cross_entropy(model(x), y), optimizer)

    for x, y in batches(4 * BATCH):
        train_step(x, y)


def left_in_eval() -> None:
    model = Net().to("xla")
    optimizer = torch.optim.AdamW(model.parameters())
    model.train()
    for _ in range(2):
        for x, y in on_device(3 * BATCH):
            with step(name="train"):
                loss = F.cross_entropy(model(x), y)  # planted: train/eval left
                update(loss, optimizer)
        model.eval()
        with step(name="validate"), torch.no_grad():
            model(torch.randn(BATCH, 16).to("xla")).argmax(1)


def optimizer_rebuilt() -> None:
    model = Net().to("xla")
    for decay in (0.01, 0.0):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=decay)
        for x, y in on_device(3 * BATCH):
            with step():
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()  # planted: optimizer rebuilt
                optimizer.zero_grad()


def rate_of_one() -> None:
    model = Net().to("xla")
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: min(1.0, (done + 1) / 4))
    for x, y in on_device(8 * BATCH):
        with step():
            loss = F.cross_entropy(model(x), y)
            update(loss, optimizer)
        warmup.step()


def last_batch() -> None:
    model = Net().to("xla")
    optimizer = torch.optim.AdamW(model.parameters())

    @CompiledStep
    def train_step(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(x), labels)
        update(loss, optimizer)
        return loss.detach()

    for x, y in batches(3 * BATCH + 5):
        train_step(x, labels=y)


def averaged_weights() -> None:
    model = Net().to("xla")
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.AdamW(model.parameters())
    for x, y in on_device(6 * BATCH):
        with step():
            loss = F.cross_entropy(model(x), y)
            update(loss, optimizer)
        average.update_parameters(model)


def autocast_toggled() -> None:
    model = Net().to("xla")
    optimizer = torch.optim.AdamW(model.parameters())
    for epoch in range(2):
        for x, y in on_device(3 * BATCH):
            with step():
                with torch.autocast("xla", torch.bfloat16, enabled=epoch > 0):
                    loss = F.cross_entropy(model(x), y)  # planted: autocast toggled
                update(loss, optimizer)


def another_dtype() -> None:
    model = Net().to("xla")
    optimizer = torch.optim.AdamW(model.parameters())

    @CompiledStep
    def train_step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss = F.cross_entropy(model(batch["image"].float()), batch["label"])
        update(loss, optimizer)
        return loss.detach()

    for index, (x, y) in enumerate(batches(5 * BATCH)):
        # Some pictures were stored as bytes.
        train_step({"image": x.byte() if index == 3 else x, "label": y})


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


_PAD = r"pad (batches )?to a fixed length or to a few lengths"
PROGRAMS = [
    Program(
        "shape drift of one of several inputs",
        shape_drift,
        r"caption: \(8, 12\) int64 -> \(8, 15\) int64$",
        _PAD,
        has_line=False,
        loop="CompiledStep",
    ),
    Program(
        "box counts", box_counts, r"in split: 3 -> 4$", r"keep it the same in each step, or choose among a few values"
    ),
    Program(
        "Python int",
        integer,
        r"a Python number .* in topk: 8 -> 4$",
        r"keep it the same in each step, or choose among a few values .*: topk takes no tensor there",
    ),
    Program(
        "counter in a module",
        counter,
        r"a Python number .* in indexing: \d+ -> \d+$",
        r"make its start a tensor",
        loop="CompiledStep",
    ),
    Program(
        "train/eval left",
        left_in_eval,
        r"Net is in eval mode now; it was in train mode",
        r"model\.train\(\) before the training steps",
    ),
    Program(
        "optimizer rebuilt",
        optimizer_rebuilt,
        r"an option of AdamW changed: weight_decay: 0\.01 -> 0\.0$",
        r"make the optimizer once",
    ),
    Program("lr exactly 1.0", rate_of_one, None),
    Program(
        "last batch",
        last_batch,
        r"labels: \(8,\) int64 -> \(5,\) int64$",
        r"drop_last",
        has_line=False,
        loop="CompiledStep",
    ),
    Program("EMA after the step", averaged_weights, None),
    Program(
        "autocast toggled",
        autocast_toggled,
        r"Net runs under autocast to bfloat16 now; it ran without autocast$",
        r"autocast is on in all or in none",
    ),
    Program(
        "batch of another dtype",
        another_dtype,
        r"image: \(8, 16\) float32 -> \(8, 16\) uint8$",
        r"one dtype",
        has_line=False,
        loop="CompiledStep",
    ),
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
    Program(
        "FFT in the backward only",
        smoothed_gradients,
        r"^HostOperatorError: .* _fft_r2c,",
        r"multiply by the matrix of the transform",
    ),
]
