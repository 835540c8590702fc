"""The trainings that `benchmarks.crash` and tests kill: each writes all losses to a journal, and resumes if it can."""

from __future__ import annotations

import os
import signal
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
import transformers
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import PretrainedConfig, PreTrainedModel, TrainerCallback, TrainingArguments

import hf_trainer
from lightning_strategy import XLAEagerFabricStrategy, XLAEagerStrategy
from xla_adapters import initialize
from xla_adapters.checkpoint import CheckpointConfig
from xla_adapters.sharding import ShardingConfig

STEPS, SAVE_EVERY, BATCH, FEATURES, CLASSES = 24, 2, 8, 16, 4
# A save takes about as long as a few steps: many of the kills hit one.
WIDTH = 384
_ROWS = BATCH * STEPS // 2
DEVICES = 8
PARTS = ShardingConfig(scheme="fsdp", checkpoints="sharded")
WHOLE = ShardingConfig(scheme="fsdp")


def network() -> nn.Sequential:
    """The network of all trainings, with dropout, so that random numbers matter."""
    return nn.Sequential(
        nn.Linear(FEATURES, WIDTH),
        nn.Tanh(),
        nn.Dropout(0.3),
        nn.Linear(WIDTH, WIDTH),
        nn.Tanh(),
        nn.Linear(WIDTH, CLASSES),
    )


def rows() -> tuple[torch.Tensor, torch.Tensor]:
    """Two epochs of these are a training."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(_ROWS, FEATURES, generator=generator), torch.randint(CLASSES, (_ROWS,), generator=generator)


class _Network(PreTrainedModel):  # type: ignore[no-untyped-call]
    config_class = PretrainedConfig

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config)
        self.layers = network()
        self.post_init()  # type: ignore[no-untyped-call]

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": nn.functional.cross_entropy(self.layers(x), labels)}


def note(journal: Path, step: int, loss: float) -> None:
    """Appends a loss to the journal, exactly (in hexadecimal)."""
    with journal.open("a") as stream:
        stream.write(f"{step} {loss.hex()}\n")


class _Notes(TrainerCallback):
    def __init__(self, journal: Path) -> None:
        self._journal = journal

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if "loss" in logs:
            note(self._journal, state.global_step, logs["loss"])


def _arguments(folder: Path, **options: Any) -> TrainingArguments:
    values: dict[str, Any] = {
        "output_dir": str(folder),
        "per_device_train_batch_size": BATCH,
        "max_steps": STEPS,
        "logging_steps": 1,
        "save_strategy": "steps",
        "save_steps": SAVE_EVERY,
        "save_total_limit": 2,
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "optim": "adamw_torch",
    }
    return TrainingArguments(**{**values, **options})


def _trainer(folder: Path, journal: Path, make: Callable[..., Any], **options: Any) -> Any:
    torch.manual_seed(7)
    xs, labels = rows()
    data = [{"x": x, "labels": label} for x, label in zip(xs, labels, strict=True)]
    model = _Network(PretrainedConfig())
    return make(model=model, args=_arguments(folder, **options), train_dataset=data, callbacks=[_Notes(journal)])


def _start(sharding: ShardingConfig | None) -> None:
    if sharding is not None:
        # The process is a child, and has no runtime yet.
        os.environ["CPU_NUM_DEVICES"] = str(DEVICES)
    initialize(spmd=sharding is not None, eager=False)


def huggingface(
    folder: Path,
    journal: Path,
    *,
    asynchronous: bool = False,
    sharding: ShardingConfig | None = None,
    path: str | None = None,
) -> None:
    """`hf_trainer.Trainer`."""
    _start(sharding)
    checkpoint = CheckpointConfig(asynchronous=asynchronous, save_on="preemption")
    make = partial(hf_trainer.Trainer, checkpoint=checkpoint, sharding=sharding)
    trainer = _trainer(folder, journal, make)
    trainer.train(resume_from_checkpoint=path or any(folder.glob("checkpoint-*")))


def stock_huggingface(folder: Path, journal: Path, *, path: str | None = None) -> None:
    """`transformers.Trainer` on the plain CPU."""
    for name, module in list(sys.modules.items()):
        # With torch_xla installed it would train on XLA, where its resume is not exact.
        if name.partition(".")[0] in ("transformers", "accelerate") and "is_torch_xla_available" in vars(module):
            vars(module)["is_torch_xla_available"] = lambda *args, **kwargs: False
    trainer = _trainer(folder, journal, transformers.Trainer, use_cpu=True)
    trainer.train(resume_from_checkpoint=path or any(folder.glob("checkpoint-*")))


class _Module(L.LightningModule):
    def __init__(self, journal: Path) -> None:
        super().__init__()
        self.layers, self._journal = network(), journal

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        xs, labels = batch
        return nn.functional.cross_entropy(self.layers(xs), labels)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        note(self._journal, self.trainer.global_step, outputs["loss"].item())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def lightning(
    folder: Path,
    journal: Path,
    *,
    strategy: Callable[[], Any] | None,
    sharding: ShardingConfig | None = None,
    path: str | None = None,
) -> None:
    """Lightning's Trainer, with a strategy of ours; or on the plain CPU, if `strategy` is None."""
    if strategy is not None:
        _start(sharding)
    L.seed_everything(7, verbose=False)
    saves = ModelCheckpoint(
        dirpath=folder, every_n_train_steps=SAVE_EVERY, save_last=True, save_top_k=1, enable_version_counter=False
    )
    trainer = L.Trainer(
        max_steps=STEPS,
        callbacks=[saves],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **({"accelerator": "cpu"} if strategy is None else {"strategy": strategy()}),
    )
    loader = DataLoader(TensorDataset(*rows()), batch_size=BATCH, shuffle=True)
    trainer.fit(_Module(journal), loader, ckpt_path=path or "last")


def strategy(
    folder: Path,
    journal: Path,
    *,
    asynchronous: bool = False,
    sharding: ShardingConfig | None = None,
    path: str | None = None,
) -> None:
    """Lightning's Trainer with `XLAEagerStrategy`."""
    checkpoint = CheckpointConfig(asynchronous=asynchronous, save_on="preemption")
    make = partial(XLAEagerStrategy, checkpoint=checkpoint, sharding=sharding)
    lightning(folder, journal, strategy=make, sharding=sharding, path=path)


def fabric(folder: Path, journal: Path, *, sharding: ShardingConfig | None = None, path: str | None = None) -> None:
    """A loop with Fabric, which saves under one name."""
    _start(sharding)
    L.seed_everything(7, verbose=False)
    made = Fabric(strategy=XLAEagerFabricStrategy(sharding=sharding))
    made.launch()
    layers = network()
    model, optimizer = made.setup(layers, torch.optim.AdamW(layers.parameters(), lr=1e-3))
    state = {"model": model, "optimizer": optimizer, "step": 0}
    last = folder / "last.ckpt"
    if path is not None or last.exists():
        made.load(path or last, state)
    loader = DataLoader(TensorDataset(*rows()), batch_size=BATCH)
    for step, batch in enumerate([*loader, *loader], 1):
        if step <= state["step"]:
            continue
        xs, labels = made.to_device(batch)
        with made.strategy.step():  # type: ignore[attr-defined]
            loss = nn.functional.cross_entropy(model(xs), labels)
            made.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        note(journal, step, loss.item())
        if step % SAVE_EVERY == 0:
            made.save(last, {**state, "step": step})


OURS: dict[str, Callable[..., None]] = {
    "hf_trainer, sync": huggingface,
    "hf_trainer, async": partial(huggingface, asynchronous=True),
    "hf_trainer, fsdp, in parts": partial(huggingface, sharding=PARTS),
    "hf_trainer, fsdp, async": partial(huggingface, asynchronous=True, sharding=WHOLE),
    "XLAEagerStrategy, sync": strategy,
    "XLAEagerStrategy, async": partial(strategy, asynchronous=True),
    "XLAEagerStrategy, fsdp, in parts": partial(strategy, sharding=PARTS),
    "XLAEagerStrategy, fsdp, async": partial(strategy, asynchronous=True, sharding=WHOLE),
    "XLAEagerFabricStrategy": fabric,
    "XLAEagerFabricStrategy, fsdp, in parts": partial(fabric, sharding=PARTS),
}
PEERS: dict[str, Callable[..., None]] = {
    "transformers.Trainer": stock_huggingface,
    "Lightning's Trainer": partial(lightning, strategy=None),
}
RUNS = {**OURS, **PEERS}


@dataclass(frozen=True)
class Noted:
    """A loss in the journal, and the seconds since the first."""

    step: int
    loss: str


def losses(journal: Path, start: int = 0) -> list[Noted]:
    """The losses in the journal from a byte on; an incomplete last line is ignored."""
    if not journal.exists():
        return []
    lines = journal.read_bytes()[start:].decode().split("\n")[:-1]
    return [Noted(int(line.split()[0]), line.split()[1]) for line in lines]


def die_after(seconds: float, journal: Path, *, grace: float | None = None) -> None:
    """Starts a separate process that kills this one some time after its next loss.

    Args:
        seconds: from the loss to the kill.
        journal: the file of losses.
        grace: if given, SIGTERM is sent first, and SIGKILL so many seconds later.
    """
    victim, before = os.getpid(), journal.stat().st_size if journal.exists() else 0
    if os.fork() != 0:
        return
    while os.getppid() == victim and (not journal.exists() or journal.stat().st_size == before):
        time.sleep(0.001)
    time.sleep(seconds)
    if grace is not None and os.getppid() == victim:
        os.kill(victim, signal.SIGTERM)
        time.sleep(grace)
    if os.getppid() == victim:
        os.kill(victim, signal.SIGKILL)
    os._exit(0)


def loads(run: Callable[..., None], folder: Path, path: Path) -> str | None:
    """The error of a training that resumes from a checkpoint; None if there is none."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            run(folder, folder / "unused.txt", path=str(path))
        except Exception as error:  # noqa: BLE001 (whatever it is, it was noticed)
            return f"{type(error).__name__}: {error}"
    return None
