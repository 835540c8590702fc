"""Loops as most people write them: these are expected to be replayed."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR

from tests.device import DEVICE
from tests.replay.reachable.data import CLASSES, FEATURES, classified, regressed, tokens
from tests.replay.reachable.program import Built, Loop, program
from tests.support import update


@program(plain=True)
def mlp_adamw() -> Built:
    """A schedule, dropout and clipping."""
    model = nn.Sequential(nn.Linear(FEATURES, 6), nn.GELU(), nn.Dropout(0.2), nn.Linear(6, CLASSES)).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)
    schedule = CosineAnnealingLR(optimizer, 20)

    def train_step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Loop(
        step=train_step,
        batch=classified,
        model=model,
        optimizers=(optimizer,),
        after=lambda number: schedule.step(),
        roots={"schedule": schedule},
    )


@program(plain=True)
def batch_norm_momentum() -> Built:
    model = nn.Sequential(nn.Linear(FEATURES, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, CLASSES)).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)

    def train_step(x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = model(x)
        loss = F.cross_entropy(logits, y, label_smoothing=0.1)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return {"loss": loss.detach(), "accuracy": (logits.argmax(-1) == y).float().mean()}

    return Loop(step=train_step, batch=classified, model=model, optimizers=(optimizer,))


@program(plain=True)
def language_model() -> Built:
    """Tied weights, a table of positions, tokens shifted by one."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(11, 6)
            self.position = nn.Embedding(5, 6)
            self.norm = nn.LayerNorm(6)
            self.head = nn.Linear(6, 11, bias=False)
            self.head.weight = self.embedding.weight
            self.scale = 1.5

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            positions = torch.arange(ids.shape[1], device=ids.device)
            return self.head(self.norm(self.embedding(ids) * self.scale + self.position(positions)))

    model = Model().to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, betas=(0.9, 0.95))

    def train_step(ids: torch.Tensor) -> torch.Tensor:
        logits = model(ids)
        return update(F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()), optimizer)

    return Loop(step=train_step, batch=tokens, model=model, optimizers=(optimizer,))


@program(plain=True)
def annealed_weight_in_a_namespace() -> Built:
    """An argparse namespace whose numbers the loop may change."""
    args = SimpleNamespace(beta=0.1, clip=1.0, use_aux=True)
    model = nn.Linear(FEATURES, CLASSES).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train_step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        output = model(x)
        loss = F.mse_loss(output, y)
        if args.use_aux:
            loss = loss + args.beta * output.square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Loop(step=train_step, batch=regressed, model=model, optimizers=(optimizer,))


@dataclass
class LossConfig:
    kind: str = "ce"
    smoothing: float = 0.1
    classes: tuple[int, ...] = (0, 1)
    weights: dict[str, float] = field(default_factory=lambda: {"main": 1.0, "auxiliary": 0.5})


@program(plain=True)
def config_dataclass() -> Built:
    config = LossConfig()
    model = nn.Linear(FEATURES, CLASSES).to(DEVICE)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)

    def train_step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        logits = model(x)
        if config.kind == "ce":
            loss = F.cross_entropy(logits, y, label_smoothing=config.smoothing) * config.weights["main"]
        else:
            loss = logits.square().mean()
        for column in config.classes:
            loss = loss + config.weights["auxiliary"] * logits[:, column].mean()
        return update(loss, optimizer)

    return Loop(step=train_step, batch=classified, model=model, optimizers=(optimizer,))


@program(plain=True)
def averaged_weights() -> Built:
    """An exponential average that the step updates."""
    model = nn.Linear(FEATURES, CLASSES).to(DEVICE)
    average = copy.deepcopy(model)
    for parameter in average.parameters():
        parameter.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    decay = 0.9

    def train_step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for mean, value in zip(average.parameters(), model.parameters(), strict=True):
                mean.lerp_(value, 1 - decay)
        return loss.detach()

    return Loop(
        step=train_step,
        batch=classified,
        model=nn.ModuleList([model, average]),
        optimizers=(optimizer,),
        modules=(average,),
    )


@program(plain=True)
def teacher_and_student() -> Built:
    """Distillation with a temperature."""
    teacher = nn.Linear(FEATURES, CLASSES).to(DEVICE).eval()
    student = nn.Sequential(nn.Linear(FEATURES, 4), nn.ReLU(), nn.Linear(4, CLASSES)).to(DEVICE)
    optimizer = torch.optim.AdamW(student.parameters(), lr=0.02)
    temperature, alpha = 2.0, 0.5

    def train_step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            target = F.softmax(teacher(x) / temperature, -1)
        logits = student(x)
        soft = F.kl_div(F.log_softmax(logits / temperature, -1), target, reduction="batchmean")
        return update(alpha * soft + (1 - alpha) * F.cross_entropy(logits, y), optimizer)

    return Loop(step=train_step, batch=classified, model=nn.ModuleList([student, teacher]), optimizers=(optimizer,))


@program(plain=True)
def two_groups_warmup() -> Built:
    """Rates by layer, with a warm-up that starts at 0."""
    model = nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, CLASSES)).to(DEVICE)
    optimizer = torch.optim.AdamW(
        [{"params": model[0].parameters(), "lr": 0.01}, {"params": model[2].parameters(), "weight_decay": 0.0}], lr=0.03
    )
    warmup = 3
    schedule = LambdaLR(optimizer, lambda step: min(1.0, step / warmup))

    def train_step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return update(F.cross_entropy(model(x), y), optimizer)

    return Loop(
        step=train_step,
        batch=classified,
        model=model,
        optimizers=(optimizer,),
        after=lambda number: schedule.step(),
        roots={"schedule": schedule},
    )


class _Symmetric(nn.Module):
    strength = 0.5

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * self.strength + weight.mean(0, keepdim=True)


@program(plain=True)
def parametrized_weight() -> Built:
    model = nn.Sequential(nn.Linear(FEATURES, 4), nn.Tanh(), nn.Linear(4, CLASSES))
    parametrize.register_parametrization(model[0], "weight", _Symmetric())
    model = model.to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train_step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return update(F.mse_loss(model(x), y), optimizer)

    return Loop(step=train_step, batch=regressed, model=model, optimizers=(optimizer,))


@program(plain=True)
def generator_and_critic() -> Built:
    """Two models, two optimizers, one step."""
    generator = nn.Linear(FEATURES, CLASSES).to(DEVICE)
    critic = nn.Linear(CLASSES, 1).to(DEVICE)
    slow = torch.optim.RMSprop(critic.parameters(), lr=0.01)
    fast = torch.optim.Adam(generator.parameters(), lr=0.02, betas=(0.5, 0.9))

    def train_step(x: torch.Tensor, real: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        fake = generator(x)
        critic_loss = critic(fake.detach()).mean() - critic(real).mean()
        critic_loss.backward()
        slow.step()
        slow.zero_grad()
        loss = -critic(fake).mean()
        loss.backward()
        fast.step()
        fast.zero_grad()
        slow.zero_grad()
        return critic_loss.detach(), loss.detach()

    return Loop(step=train_step, batch=regressed, model=nn.ModuleList([generator, critic]), optimizers=(slow, fast))
