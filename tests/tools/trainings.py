"""A small net, its batch and its step; scripts of users; for tests."""

from __future__ import annotations

import tempfile
from importlib import util
from pathlib import Path

import pytest
import torch
from torch import nn

from xla_adapters.sharding import Mesh, ShardingPlan, template
from xla_adapters.tools.step_capture import TracedStep
from xla_adapters.tools.trace_process import OneStep, Request, Traced, trace

ROWS, WIDTH = 16, 128
needs_libtpu = pytest.mark.skipif(
    util.find_spec("libtpu") is None or util.find_spec("pypjrt") is None,
    reason='libtpu or pypjrt is not installed: pip install "xla-adapters[preflight]"',
)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH, bias=False)
        self.norm, self.drop = nn.LayerNorm(WIDTH), nn.Dropout(0.1)

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.norm(inputs + self.drop(self.down(torch.relu(self.up(inputs)))))
        return {"loss": nn.functional.cross_entropy(hidden, labels)}


def batch(rows: int = ROWS, device: str = "cpu") -> dict[str, torch.Tensor]:
    return {
        "inputs": torch.zeros(rows, WIDTH, device=device),
        "labels": torch.zeros(rows, dtype=torch.long, device=device),
    }


def net() -> Net:
    with torch.device("meta"):
        return Net()


def factory(rows: int, length: int | None) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """What `--model tests.tools.trainings:factory` calls."""
    return Net(), {"inputs": torch.empty(rows, WIDTH), "labels": torch.empty(rows, dtype=torch.long)}


def plan_of(scheme: str, *shape: int) -> ShardingPlan:
    return template(scheme, net(), Mesh.data_and_model(*shape))


def traced(plan: ShardingPlan, model: nn.Module, *, rows: int = ROWS) -> Traced:
    """What tracing a step of a model gives, in this process."""
    with tempfile.TemporaryDirectory() as folder:
        return trace(
            Path(folder),
            lambda hand: OneStep(plan=plan)(model, batch(rows, "meta"), hand),
            Request(generation="v5e", spmd=True),
        )


def traced_step(scheme: str, *shape: int, rows: int = ROWS) -> TracedStep:
    """The step of the net under a template."""
    found = traced(plan_of(scheme, *shape), net(), rows=rows)
    assert found.problem == ""
    (step,) = found.steps
    return step


LOOP = """
import torch, xla_adapters

xla_adapters.initialize()
layers = torch.nn.Sequential(torch.nn.Linear(128, 256), torch.nn.Tanh(), torch.nn.Linear(256, 8)).to("xla")
optimizer = torch.optim.AdamW(layers.parameters())
batch = torch.zeros(ROWS, 128)
while True:
    with xla_adapters.step():
        hidden = layers[1](layers[0](batch.to("xla")))
        loss = layers[2](hidden).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(layers.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    print("the loss is", loss.item())
"""
# The same, with the code of the model in lines of its own and 17 GB in one of them.
TOO_LARGE = LOOP.replace("ROWS", "2**17").replace("256", "2**17")
LOOP = LOOP.replace("ROWS", "16")

BATCH_NORM = """
import torch, xla_adapters

xla_adapters.initialize()
net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8)).to("xla")
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for number in range(6):
    with xla_adapters.step():
        net(torch.zeros(4, 8).to("xla")).square().mean().backward()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
"""

TRANSFORMERS = """
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

def collate(rows):
    tokens = torch.stack(rows)
    return {"input_ids": tokens, "labels": tokens.clone()}

sizes = {"n_layer": 1, "n_head": 1, "n_embd": 64, "vocab_size": 64, "n_positions": 16}
model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
rows = list(torch.randint(1, 64, (32, 16)))
arguments = TrainingArguments(
    "out", per_device_train_batch_size=8, per_device_eval_batch_size=4, gradient_accumulation_steps=2, max_steps=2,
    bf16=True, save_steps=1, report_to=[], lr_scheduler_type="constant",
)
trainer = Trainer(model, arguments, train_dataset=rows, eval_dataset=rows, data_collator=collate)
trainer.evaluate()
trainer.train()
trainer.save_model("final")
"""

LIGHTNING = """
import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset

class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer, self.drop = torch.nn.Linear(64, 8), torch.nn.Dropout(0.1)

    def training_step(self, batch, index):
        inputs, labels = batch
        loss = torch.nn.functional.cross_entropy(self.drop(self.layer(inputs)), labels)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, index):
        inputs, labels = batch
        self.log("val_loss", torch.nn.functional.cross_entropy(self.layer(inputs), labels))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

loader = DataLoader(TensorDataset(torch.randn(64, 64), torch.zeros(64, dtype=torch.long)), batch_size=16)
trainer = L.Trainer(max_epochs=3, accumulate_grad_batches=2, gradient_clip_val=0.5, accelerator="cpu", devices=1)
trainer.validate(Net(), loader)
trainer.fit(Net(), loader, loader)
trainer.save_checkpoint("final.ckpt")
"""

# Its arguments are those of the command line, which name the Trainer's.
LIGHTNING_CLI = """
import sys
import lightning as L
import torch
from lightning.pytorch.cli import LightningCLI

class Net(L.LightningModule):
    def __init__(self, width: int = 8):
        super().__init__()
        self.layer = torch.nn.Linear(64, width)

    def training_step(self, batch, index):
        return self.layer(batch).square().mean()

    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.zeros(64, 64), 16)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

sys.argv[1:] = ["fit", "--trainer.max_steps", "3", "--model.width", "16"]
LightningCLI(Net)
"""
