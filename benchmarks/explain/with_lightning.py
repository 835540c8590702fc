"""Programs of Lightning with one fault each."""

from __future__ import annotations

import functools
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import GradientAccumulationScheduler

from benchmarks.explain.measure import Program
from benchmarks.explain.own_loops import BATCH, Net, batches
from lightning_strategy import XLAEagerStrategy


class Plain(L.LightningModule):
    """A classifier as the guides write it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def fit(module: L.LightningModule, **options: Any) -> None:
    """Trains as a script does, with four batches, and these options of Lightning's trainer."""
    arguments: dict[str, Any] = {
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        **options,
    }
    L.Trainer(strategy=XLAEagerStrategy(), **arguments).fit(module, batches(4 * BATCH))


class Focal(Plain):
    """Anneals the focus of its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.gamma = 2.0

    def on_train_epoch_start(self) -> None:
        self.gamma = 2.0 if self.current_epoch == 0 else 1.5

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        chosen = self.net(x).log_softmax(1).gather(1, y[:, None])
        focus = (1 - chosen.exp()) ** self.gamma  # planted: Python float
        return -(focus * chosen).mean()


def floating() -> None:
    fit(Focal(), max_epochs=2)


class MoreDropout(Plain):
    """Drops more in later epochs."""

    def on_train_epoch_start(self) -> None:
        self.net.dropout.p = 0.1 * (1 + self.current_epoch)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        hidden = self.net.dropout(torch.relu(self.net.hidden(x)))  # planted: dropout rate
        return F.cross_entropy(self.net.head(hidden), y)


def dropout() -> None:
    fit(MoreDropout(), max_epochs=2)


class Watch(L.Callback):
    """Keeps what a layer computes in one of the epochs."""

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        if trainer.current_epoch == 1:
            pl_module.net.head.register_forward_hook(lambda module, args, output: output * 1.01)


class Hooked(Plain):
    """Calls a layer that gets a hook."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        return F.cross_entropy(self.net.head(self.net.hidden(x)), y)  # planted: hook added


def hook() -> None:
    fit(Hooked(), max_epochs=2, callbacks=[Watch()])


class Counting(Plain):
    """Counts what it gets right."""

    def __init__(self) -> None:
        super().__init__()
        self.right = 0

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        logits = self.net(x)
        self.right += (logits.argmax(1) == y).sum().item()  # planted: .item() in a metric
        return F.cross_entropy(logits, y)


def metric() -> None:
    fit(Counting())


class Careful(Plain):
    """Takes smaller steps where the loss is large."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        if loss > 5:  # planted: data-dependent branch
            loss = loss * 0.1
        return loss


def branch() -> None:
    fit(Careful())


def accumulation() -> None:
    fit(Plain(), max_epochs=2, callbacks=[GradientAccumulationScheduler(scheduling={0: 1, 1: 2})])


_program = functools.partial(Program, loop="Lightning")
PROGRAMS = [
    _program(
        "Python float",
        floating,
        r"a Python number .* in pow: 2\.0 -> 1\.5$",
        r"make it a tensor in the step \(torch\.tensor",
    ),
    _program(
        "dropout rate",
        dropout,
        r"in dropout: 0\.1 -> 0\.2$",
        r"choose among a few values .*: dropout takes no tensor there",
    ),
    _program("hook added", hook, r"Linear has 1 hooks now; it had 0$", r"register hooks before the training"),
    _program(
        ".item() in a metric",
        metric,
        r"^TensorReadError: tensor read .*\.item\(\)$",
        r"an accumulating tensor instead of a Python sum",
    ),
    _program(
        "data-dependent branch",
        branch,
        r"^TensorReadError: tensor read .*bool\(tensor\)$",
        r"torch\.where instead of `if`",
    ),
    _program(
        "accumulation changed",
        accumulation,
        r"gradients: absent -> present$",
        r"keep the options of the training \(accumulation",
        has_line=False,
    ),
]
