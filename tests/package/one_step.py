"""Trains one step with the core, with HuggingFace's Trainer and with Lightning's, and prints what came out as JSON.

Run by `test_wheel.py` in an environment in which the package is installed; it imports nothing of this repository.
"""

import json
import sys

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

import hf_trainer
import lightning_strategy
import xla_adapters


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> torch.Tensor:
        inputs, wanted = batch
        return torch.nn.functional.mse_loss(self.layer(inputs), wanted)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def core() -> float:
    model = torch.nn.Linear(4, 2).to("xla")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model.weight.detach().cpu()
    with xla_adapters.step():
        loss = model(torch.ones(3, 4, device="xla")).square().mean()
        loss.backward()
        optimizer.step()
    return float((model.weight.detach().cpu() - before).abs().max())


def huggingface(folder: str) -> float:
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=16, n_positions=8))
    before = model.transformer.wte.weight.detach().clone()
    tokens = torch.arange(8)
    trainer = hf_trainer.Trainer(
        model,
        TrainingArguments(folder, max_steps=1, per_device_train_batch_size=2, save_strategy="no", report_to="none"),
        train_dataset=[{"input_ids": tokens, "labels": tokens}] * 2,
    )
    trainer.train()
    return float((model.transformer.wte.weight.detach().cpu() - before).abs().max())


def lightning(folder: str) -> float:
    net = Net()
    before = net.layer.weight.detach().clone()
    trainer = pl.Trainer(
        max_steps=1,
        strategy=lightning_strategy.XLAEagerStrategy(),
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(net, DataLoader(TensorDataset(torch.ones(2, 4), torch.zeros(2, 2)), batch_size=2))
    return float((net.layer.weight.detach().cpu() - before).abs().max())


if __name__ == "__main__":
    xla_adapters.initialize()
    changes, executions = {}, {}
    # Trying replay out executes two graphs, once in a process.
    assert xla_adapters.get_runtime().replay_works
    trainings = {"core": core, "hf": lambda: huggingface(sys.argv[1]), "lightning": lambda: lightning(sys.argv[1])}
    for name, train in trainings.items():
        with xla_adapters.count() as counters:
            changes[name] = train()
        executions[name] = counters.executions
    files = [package.__file__ for package in (xla_adapters, hf_trainer, lightning_strategy)]
    print(
        json.dumps(
            {
                "changes": changes,
                "executions": executions,
                "files": files,
                "path": sys.path,
                "python": sys.version_info[:2],
            }
        )
    )
