"""The cost of checkpoints: how long the loop is blocked, and how long a save takes; `python -m benchmarks.checkpoint`.

A state of parameters and AdamW's two moments on the device, written by
  ours, async / ours, sync    `AsyncSaver` and `CheckpointStore`: flushed, read back from the disk and compared;
  torch.save, safetensors     the functions, on tensors copied to the host;
  DCP                         `torch.distributed.checkpoint.save` on tensors copied to the host;
  Lightning                   `TorchCheckpointIO.save_checkpoint`, likewise.
The last four do not read anything back, and only DCP flushes. Then trainers, stock and ours, save the same amount in a
training on the device: their own method that saves is timed, in a process each, in turns. For comparison: the copy to
the host alone, which any save must wait for, and the same bytes written to the disk and flushed. All of them run in
every round; before each, pending disk writes are flushed. Medians over the rounds, per gigabyte (10^9 bytes). The time
that an async save blocks is compared with the copy to the host in the same round and process.
"""

from __future__ import annotations

import functools
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
import transformers
from lightning.fabric.plugins.io import TorchCheckpointIO
from safetensors.torch import save_file
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.utils.data import DataLoader, TensorDataset
from transformers import PretrainedConfig, PreTrainedModel

import hf_trainer
from benchmarks import report
from benchmarks.harness import Pause, run_interleaved
from benchmarks.timed_trainers import stock_on_xla
from benchmarks.training import arguments
from lightning_strategy import XLAEagerStrategy
from lightning_strategy.checkpoints import XLAEagerCheckpointIO
from tests.children import run_in_child
from xla_adapters import get_runtime, initialize
from xla_adapters.checkpoint import AsyncSaver, CheckpointStore, snapshot

_LAYERS, _BATCH = 8, 4
# One differs from the next by half.
_COPIES = 3
STOCK_HF, STOCK_LIGHTNING = "transformers.Trainer", "Lightning's Trainer"


@dataclass(frozen=True)
class Times:
    """The times of one save, in seconds.

    Attributes:
        copy: of the state to the host, alone.
        blocked: until the training continues.
        total: until the checkpoint is complete.
    """

    copy: float
    blocked: float
    total: float


class _Layers(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(_LAYERS)))

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        values: torch.Tensor = self.layers(x)
        return values.square().mean()


class _Pretrained(PreTrainedModel):  # type: ignore[no-untyped-call]
    config_class = PretrainedConfig

    def __init__(self, config: PretrainedConfig, width: int = 1) -> None:
        super().__init__(config)
        self.network = _Layers(width)
        self.post_init()  # type: ignore[no-untyped-call]

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.network.loss(x)}


def width_of(megabytes: int) -> int:
    """The width of a network whose weights and two moments take so many megabytes."""
    return int((megabytes * 10**6 / 4 / 3 / _LAYERS) ** 0.5)


class _Clock:
    """Times saves, and gives the turn away after each; the first is a warm-up."""

    def __init__(self, pause: Pause) -> None:
        self.times: list[Times] = []
        self._pause, self._warm = pause, False

    def save(self, state: Iterable[torch.Tensor], save: Callable[[], None], finish_pending: Callable[[], None]) -> None:
        runtime, tensors = get_runtime(), list(state)
        runtime.tracing.flush()
        runtime.device.wait()
        os.sync()
        copies = []
        for _ in range(_COPIES + 1):
            started = time.perf_counter()
            runtime.transfers.to_host(tensors)
            copied = time.perf_counter()
            copies.append(copied - started)
        # All but the first find memory that the process has, as a save does that is not the first.
        copy = statistics.median(copies[1:])
        save()
        blocked = time.perf_counter()
        finish_pending()
        ended = time.perf_counter()
        if self._warm:
            self.times.append(Times(copy, blocked - copied, ended - copied))
        self._warm = True
        self._pause()


def _tensors(model: nn.Module, optimizer: Any) -> Iterable[torch.Tensor]:
    yield from model.parameters()
    for values in optimizer.state.values():
        yield from (
            value for value in values.values() if isinstance(value, torch.Tensor) and value.device.type == "xla"
        )


def huggingface(pause: Pause, *, width: int, rounds: int, where: Path, checkpoint: Any = None) -> list[Times]:
    """transformers' Trainer on the device; ours if `checkpoint` says how it saves."""
    initialize(eager=False)
    clock = _Clock(pause)
    base: Any = transformers.Trainer if checkpoint is None else partial(hf_trainer.Trainer, checkpoint=checkpoint)

    saves = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 1}
    run = {"per_device_train_batch_size": _BATCH, "max_steps": rounds + 1, "optim": "adamw_torch"}
    args = arguments(str(where), **saves, **run)
    data = [{"x": row} for row in torch.randn(_BATCH * (rounds + 1), width)]
    trainer = base(model=_Pretrained(PretrainedConfig(), width), args=args, train_dataset=data)
    stock = trainer._save_checkpoint

    def save(model: Any, trial: Any) -> None:
        optimizer = trainer.optimizer
        while hasattr(optimizer, "optimizer"):
            optimizer = optimizer.optimizer
        finish_pending = trainer._xla.checkpoints.finish_pending if checkpoint is not None else _nothing
        clock.save(_tensors(trainer.model, optimizer), lambda: stock(model, trial), finish_pending)

    trainer._save_checkpoint = save
    trainer.train()
    return clock.times


class _Module(L.LightningModule):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.network = _Layers(width)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.network.loss(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class _Saves(L.Callback):
    def __init__(self, clock: _Clock, where: Path) -> None:
        self._clock, self._where = clock, where

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        io = trainer.strategy.checkpoint_io
        finish_pending = io.finish_pending if isinstance(io, XLAEagerCheckpointIO) else _nothing
        save = partial(trainer.save_checkpoint, self._where / "last.ckpt")
        self._clock.save(_tensors(pl_module, trainer.optimizers[0]), save, finish_pending)


def lightning(pause: Pause, *, width: int, rounds: int, where: Path, checkpoint: Any = None) -> list[Times]:
    """Lightning's Trainer on the device, with its own strategy; with ours if `checkpoint` says how it saves."""
    initialize(eager=False)
    clock = _Clock(pause)
    chosen: dict[str, Any] = {"strategy": XLAEagerStrategy(checkpoint=checkpoint)}
    if checkpoint is None:
        chosen = stock_on_xla()
    trainer = L.Trainer(
        max_steps=rounds + 1,
        callbacks=[_Saves(clock, where)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **chosen,
    )
    data = DataLoader(TensorDataset(torch.randn(_BATCH * (rounds + 1), width)), batch_size=_BATCH)
    trainer.fit(_Module(width), data)
    return clock.times


def _nothing() -> None: ...


TRAINERS: dict[str, Callable[..., list[Times]]] = {
    STOCK_HF: huggingface,
    "hf_trainer, sync": partial(huggingface, checkpoint={"asynchronous": False}),
    "hf_trainer, async": partial(huggingface, checkpoint={"asynchronous": True}),
    STOCK_LIGHTNING: lightning,
    "XLAEagerStrategy, sync": partial(lightning, checkpoint={"asynchronous": False}),
    "XLAEagerStrategy, async": partial(lightning, checkpoint={"asynchronous": True}),
}


def players(names: Iterable[str], megabytes: int, rounds: int, where: Path) -> dict[str, Callable[[Pause], Any]]:
    """The trainers for `run_interleaved`, each with its own folder."""
    width = width_of(megabytes)
    return {
        name: partial(TRAINERS[name], width=width, rounds=rounds, where=Path(tempfile.mkdtemp(dir=where)))
        for name in names
    }


State = dict[str, torch.Tensor]
COPY, DISK, ASYNC, SYNC = "copy to the host", "write and flush", "ours, async", "ours, sync"
_TENSORS = 24


def state_of(megabytes: int) -> State:
    """Parameters and moments on the device."""
    count = megabytes * 10**6 // 4 // _TENSORS
    generator = torch.Generator().manual_seed(0)
    names = [f"{kind}.{number}" for kind in ("weight", "exp_avg", "exp_avg_sq") for number in range(_TENSORS // 3)]
    return {name: torch.randn(count, generator=generator).to("xla") for name in names}


def write_and_flush(state: State, folder: Path) -> None:
    """Writes and flushes the same bytes: the disk's own speed."""
    with (folder / "raw").open("wb", buffering=0) as stream:
        for tensor in state.values():
            stream.write(memoryview(tensor.numpy()).cast("B"))
        os.fsync(stream.fileno())


def write_torch(state: State, folder: Path) -> None:
    torch.save(state, folder / "state.pt")


# The peers, by name.
WRITERS: dict[str, Callable[[State, Path], object]] = {
    "torch.save": write_torch,
    "safetensors": lambda state, folder: save_file(state, folder / "model.safetensors"),
    "DCP": lambda state, folder: dcp.save(dict(state), checkpoint_id=folder / "sharded", no_dist=True),
    "Lightning": lambda state, folder: TorchCheckpointIO().save_checkpoint({"state_dict": state}, folder / "m.ckpt"),
}


def timed(action: Callable[[], object]) -> tuple[float, float]:
    """What takes as long as it blocks the loop: seconds blocked, and in all."""
    started = time.perf_counter()
    action()
    seconds = time.perf_counter() - started
    return seconds, seconds


def peer(write: Callable[[State, Path], object], state: State, folder: Path) -> tuple[float, float]:
    """Copies and writes with one of the peers."""
    return timed(lambda: write(snapshot(state), folder))


def copy_only(state: State, folder: Path) -> tuple[float, float]:
    return timed(lambda: get_runtime().transfers.to_host(list(state.values())))


def disk_only(state: State, folder: Path) -> tuple[float, float]:
    copied = snapshot(state)
    return timed(lambda: write_and_flush(copied, folder))


def ours(state: State, folder: Path, *, asynchronous: bool) -> tuple[float, float]:
    saver = AsyncSaver(CheckpointStore(folder))
    started = time.perf_counter()
    saver.save(1, state, write_torch)
    blocked = time.perf_counter() - started
    saver.wait()
    total = time.perf_counter() - started
    return (blocked if asynchronous else total), total


RUNS: dict[str, Callable[[State, Path], tuple[float, float]]] = {
    COPY: copy_only,
    DISK: disk_only,
    ASYNC: functools.partial(ours, asynchronous=True),
    SYNC: functools.partial(ours, asynchronous=False),
    **{name: functools.partial(peer, write) for name, write in WRITERS.items()},
}


def measure(megabytes: int, rounds: int, where: Path) -> dict[str, list[tuple[float, float]]]:
    """Runs in a child: seconds blocked and in all, of every run in every round."""
    initialize()
    state = state_of(megabytes)
    get_runtime().tracing.flush()
    get_runtime().device.wait()
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in RUNS}
    for number in range(rounds):
        for name in RUNS if number % 2 == 0 else reversed(RUNS):
            folder = Path(tempfile.mkdtemp(dir=where))
            os.sync()
            times[name].append(RUNS[name](state, folder))
            shutil.rmtree(folder)
    return times


def _report(name: str, seconds: list[tuple[float, float]], gigabytes: float) -> dict[str, Any]:
    blocked, total = (statistics.median(pair[which] for pair in seconds) / gigabytes for which in (0, 1))
    return {"run": name, "blocked_seconds_per_gb": blocked, "total_seconds_per_gb": total}


def main(arguments: list[str] | None = None) -> int:
    parser = report.parser(__doc__ or "")
    parser.add_argument("--megabytes", type=int, default=480, help="size of the state (480)")
    parser.add_argument("--rounds", type=int, default=7, help="how often each is run (7)")
    parser.add_argument("--folder", type=Path, default=Path("runs"), help="on the disk to be used (runs)")
    parser.add_argument("--trainers", help=f"only these ('' for none), of: {'; '.join(TRAINERS)}")
    options = parser.parse_args(arguments)
    trainers = list(TRAINERS)
    if options.trainers is not None:
        trainers = report.names_in(parser, options.trainers, TRAINERS)
    options.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        where = Path(folder)
        outcomes = {
            "": run_in_child(
                functools.partial(measure, options.megabytes, options.rounds, where), timeout=120 * options.rounds
            )
        }
        runs = players(trainers, options.megabytes, options.rounds, where)
        outcomes |= run_interleaved(runs, options.rounds, timeout=120, say=lambda text: print(text, file=sys.stderr))
    failed = [f"{name}: {outcome.error}" for name, outcome in outcomes.items() if not outcome.ok]
    if failed:
        print("\n".join(failed), file=sys.stderr)
        return 1
    gigabytes, measured = options.megabytes / 1000, outcomes.pop("").value
    rows = [_report(name, times, gigabytes) for name, times in measured.items()]
    # Of the same round: the machine may be busier in another.
    ratios = {ASYNC: [ours[0] / copy[0] for ours, copy in zip(measured[ASYNC], measured[COPY], strict=True)]}
    for name, outcome in outcomes.items():
        rows.append(_report(name, [(times.blocked, times.total) for times in outcome.value], gigabytes))
        if name.endswith("async"):
            ratios[name] = [times.blocked / times.copy for times in outcome.value]
    print(report.table(("run", "blocked s/GB", "in all s/GB"), [tuple(row.values()) for row in rows]))
    result = report.Report("checkpoint", {"megabytes": options.megabytes, "rounds": options.rounds}, {"rows": rows})
    print()
    for name, found in ratios.items():
        ratio = statistics.median(found)
        result.target(f"{name}: blocked, to the copy to the host", ratio, "at most", 1.2)
        print(f"{name}: blocked for {ratio:.2f} times the copy to the host")
    return result.finish(options)


if __name__ == "__main__":
    sys.exit(main())
