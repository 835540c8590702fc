"""Scripts of users, for tests."""

from __future__ import annotations

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
