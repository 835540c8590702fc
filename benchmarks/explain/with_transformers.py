"""Programs of the HF Trainer with one fault each."""

from __future__ import annotations

import functools
import tempfile
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import nn
from transformers import TrainerCallback

from benchmarks.explain.measure import Program
from benchmarks.training import arguments
from hf_trainer import Trainer

BATCH, CLASSES, WORDS = 8, 4, 50


class Texts(torch.utils.data.Dataset[Any]):
    """Random words of one length, with a label each."""

    def __init__(self, number: int, length: int = 12) -> None:
        self.words = torch.randint(1, WORDS, (number, length))

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": self.words[index], "labels": index % CLASSES}


class Classifier(nn.Module):
    """The mean of embeddings, and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(WORDS, 16), nn.Linear(16, CLASSES)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None, **_: Any) -> dict[str, Any]:
        hidden = self.embedding(input_ids).mean(1)  # planted: frozen layer
        logits = self.head(hidden)
        loss = None if labels is None else F.cross_entropy(logits, labels)
        return {"loss": loss, "logits": logits}


def train(model: nn.Module, data: Any, *, kind: type[Any] = Trainer, **options: Any) -> None:
    """Trains as a script does.

    Args:
        model: what.
        data: of the training.
        kind: the trainer's class.
        **options: of the trainer, or training arguments.
    """
    of_trainer = ("eval_dataset", "callbacks", "data_collator")
    given = {name: options.pop(name) for name in of_trainer if name in options}
    sizes = {"per_device_train_batch_size": BATCH, "per_device_eval_batch_size": BATCH, "logging_steps": 2}
    with tempfile.TemporaryDirectory() as folder:
        kind(model=model, args=arguments(folder, **{**sizes, **options}), train_dataset=data, **given).train()


class Focal(Trainer):
    """Looks at the hardest examples in the second half of the training."""

    def compute_loss(self, model: nn.Module, inputs: Any, *_: Any, **__: Any) -> Any:
        labels = inputs.pop("labels")
        losses = F.cross_entropy(model(**inputs)["logits"], labels, reduction="none")
        hard = self.state.global_step >= 3
        return losses.topk(4, largest=hard).values.mean()  # planted: Python bool


def boolean() -> None:
    train(Classifier(), Texts(6 * BATCH), kind=Focal)


class Freeze(TrainerCallback):
    """Trains the embedding for a while."""

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if state.global_step == 3:
            model.embedding.requires_grad_(False)


def frozen() -> None:
    train(Classifier(), Texts(6 * BATCH), callbacks=[Freeze()])


class GradientNorms(TrainerCallback):
    """Collects the norms of gradients."""

    def __init__(self) -> None:
        self.norms: list[float] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
        self.norms.append(norm.item())  # planted: callback reading gradients


def gradients_read() -> None:
    train(Classifier(), Texts(4 * BATCH), callbacks=[GradientNorms()])


class Weighted(Trainer):
    """Weighs a batch by how well it is known."""

    def compute_loss(self, model: nn.Module, inputs: Any, *_: Any, **__: Any) -> Any:
        loss = model(**inputs)["loss"]
        weight = min(1.0, loss.item())  # planted: .item() in the loss
        return loss * weight


def item_in_loss() -> None:
    train(Classifier(), Texts(4 * BATCH), kind=Weighted)


class Spectral(Trainer):
    """Compares predictions and labels by their spectra, too."""

    def compute_loss(self, model: nn.Module, inputs: Any, *_: Any, **__: Any) -> Any:
        outputs = model(**inputs)
        labels = F.one_hot(inputs["labels"], CLASSES).float()
        spectrum = torch.fft.rfft(outputs["logits"].softmax(1) - labels)  # planted: FFT in the loss
        return outputs["loss"] + 0.1 * spectrum.abs().mean()


def fourier() -> None:
    train(Classifier(), Texts(4 * BATCH), kind=Spectral)


def longer_validation() -> None:
    train(
        Classifier(),
        Texts(4 * BATCH),
        eval_dataset=Texts(2 * BATCH, length=20),
        eval_strategy="epoch",
        num_train_epochs=2,
    )


class SometimesWeighted:
    """A collator for data of which a part has weights."""

    def __init__(self) -> None:
        self.made = 0

    def __call__(self, features: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        batch: dict[str, torch.Tensor] = transformers.default_data_collator(features)
        self.made += 1
        if self.made > 3:
            batch["weights"] = torch.ones(len(features))
        return batch


def new_key() -> None:
    train(Classifier(), Texts(6 * BATCH), data_collator=SometimesWeighted(), remove_unused_columns=False)


class Reduction(Trainer):
    """Sums the loss at the end."""

    def compute_loss(self, model: nn.Module, inputs: Any, *_: Any, **__: Any) -> Any:
        labels = inputs.pop("labels")
        logits = model(**inputs)["logits"]
        reduction = "mean" if self.state.global_step < 3 else "sum"
        return F.cross_entropy(logits, labels, reduction=reduction)  # planted: Python string


def string() -> None:
    train(Classifier(), Texts(6 * BATCH), kind=Reduction)


_FEW = "keep it the same in each step, or choose among a few values"
_program = functools.partial(Program, loop="HF Trainer")
PROGRAMS = [
    _program("Python bool", boolean, r"a bool .* in topk: False -> True$", _FEW),
    _program("Python string", string, r"a string .* in cross_entropy: 'mean' -> 'sum'$", _FEW),
    _program(
        "frozen layer",
        frozen,
        r"parameters of Embedding are frozen now",
        r"one compile for each set of trained parameters",
    ),
    _program(
        "callback reading gradients",
        gradients_read,
        r"^TensorReadError: tensor read .*\.item\(\)$",
        r"read it after the step \(",
    ),
    _program(
        ".item() in the loss", item_in_loss, r"^TensorReadError: tensor read .*\.item\(\)$", r"keep it on the device"
    ),
    _program(
        "FFT in the loss", fourier, r"^HostOperatorError: .* _fft_r2c,", "multiply by the matrix of the transform"
    ),
    _program("validation of another length", longer_validation, None),
    _program(
        "a new dict key",
        new_key,
        r"weights: absent -> \(8,\) float32$",
        r"the same entries in each batch",
        has_line=False,
    ),
]
