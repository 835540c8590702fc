"""Hand-written loops around a `CompiledStep`, as in torch's tutorials."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from tests.programs import data
from tests.programs.program import Trained
from xla_adapters import CompiledStep, get_runtime

Compile = Callable[..., CompiledStep[Any]]
_BATCH, _STEPS = 16, 16


def _device() -> torch.device:
    return get_runtime().device.torch_device()


def _loader(batches: int = _STEPS, **options: Any) -> DataLoader[Any]:
    return DataLoader(data.digits(batches * _BATCH, **options), batch_size=_BATCH, shuffle=True)


def mlp(compiled: Compile) -> Trained:
    device = _device()
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 10)).to(device)
    loss_fn = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    @compiled
    def train_step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_fn(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    model.train()
    losses = [train_step(x, y) for x, y in _loader(flat=True)]
    return Trained(train_step, losses, [model])


class ConvNet(nn.Module):
    """Convolutions with batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 16, 3, padding=1)
        self.bn2 = nn.BatchNorm2d(16)
        self.fc = nn.Linear(16 * 4, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 2)
        x = F.max_pool2d(F.relu(self.bn2(self.conv2(x))), 2)
        return F.log_softmax(self.fc(x.flatten(1)), dim=1)


def convnet(compiled: Compile) -> Trained:
    model = ConvNet().to(_device())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=8, gamma=0.7)

    @compiled
    def train_step(x: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        output = model(x)
        loss = F.nll_loss(output, target)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        correct = (output.argmax(dim=1) == target).sum()
        return loss.detach(), correct

    model.train()
    losses = []
    for x, y in _loader():
        loss, correct = train_step(x, y)
        scheduler.step()
        losses += [loss, correct]
    return Trained(train_step, losses, [model])


class TextClassifier(nn.Module):
    """An encoder of torch's own layers; texts are padded with 0."""

    def __init__(self, vocabulary: int, classes: int, width: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width, padding_idx=0)
        self.position = nn.Parameter(torch.randn(1, data.LENGTH, width) * 0.02)
        layer = nn.TransformerEncoderLayer(width, 2, 2 * width, dropout=0.1, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(width, classes)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        padding = tokens == 0
        x = self.encoder(self.embedding(tokens) + self.position, src_key_padding_mask=padding)
        kept = (~padding).unsqueeze(-1).to(x.dtype)
        logits: torch.Tensor = self.head((x * kept).sum(1) / kept.sum(1))
        return logits


def transformer(compiled: Compile) -> Trained:
    model = TextClassifier(data.VOCABULARY, 5).to(_device())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=_STEPS)

    @compiled
    def train_step(tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = model(tokens)
        loss = F.cross_entropy(logits, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    losses = []
    loader: DataLoader[Any] = DataLoader(data.classified(64).with_format("torch"), batch_size=8)  # type: ignore[arg-type]
    for _ in range(2):
        for batch in loader:
            losses.append(train_step(batch["input_ids"], batch["label"]))
            scheduler.step()
    return Trained(train_step, losses, [model])


class Learner:
    """Keeps a model, its loss and its optimizer together."""

    def __init__(self, model: nn.Module, criterion: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model = model
        self.criterion = criterion
        self.optimizer = optimizer
        self.max_norm = 1.0

    def compute_loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.criterion(self.model(x), y)
        return loss

    def train_step(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        self.optimizer.zero_grad()
        loss = self.compute_loss(x, y)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)
        self.optimizer.step()
        return {"loss": loss.detach(), "norm": norm}


def method(compiled: Compile) -> Trained:
    model = nn.Sequential(nn.Linear(64, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 10)).to(_device())
    learner = Learner(model, nn.CrossEntropyLoss(label_smoothing=0.1), torch.optim.Adam(model.parameters(), lr=1e-3))
    step = compiled(learner.train_step)
    losses: list[torch.Tensor] = []
    for x, y in _loader(flat=True):
        losses += step(x, y).values()
    return Trained(step, losses, [model])


def accumulation(compiled: Compile) -> Trained:
    model = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10)).to(_device())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    accumulation_steps = 4

    def train_step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        total = torch.zeros((), device=x.device)
        optimizer.zero_grad()
        for inputs, labels in zip(x.chunk(accumulation_steps), y.chunk(accumulation_steps), strict=True):
            loss = F.cross_entropy(model(inputs), labels) / accumulation_steps
            loss.backward()
            total = total + loss.detach()
        optimizer.step()
        return total

    step = compiled(train_step)
    losses = [step(x, y) for x, y in _loader(flat=True)]
    return Trained(step, losses, [model])


class TwoTowers(nn.Module):
    """Brings two views of a thing to the same place; the temperature is learned."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(32, width), nn.ReLU(), nn.Linear(width, width))
        self.right = nn.Sequential(nn.Linear(32, width), nn.ReLU(), nn.Linear(width, width))
        self.log_temperature = nn.Parameter(torch.tensor(2.0))

    def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        a = F.normalize(self.left(left), dim=-1)
        b = F.normalize(self.right(right), dim=-1)
        return self.log_temperature.exp().clamp(max=100.0) * a @ b.t()


def contrastive(compiled: Compile) -> Trained:
    model = TwoTowers().to(_device())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    @compiled
    def train_step(images: torch.Tensor) -> torch.Tensor:
        # The upper half of each digit belongs to its lower half.
        upper, lower = images.chunk(2, dim=1)
        logits = model(upper, lower)
        targets = torch.arange(logits.size(0), device=logits.device)
        loss = (F.cross_entropy(logits, targets) + F.cross_entropy(logits.t(), targets)) / 2
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    losses = [train_step(images) for images, _ in _loader(flat=True)]
    return Trained(train_step, losses, [model])
