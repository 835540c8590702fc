"""What a checkpoint costs: how long the loop is blocked, how long until it is there; `python -m benchmarks.checkpoint`.

A state of parameters and two moments of AdamW on the device, written by
  ours, async / ours, sync    `AsyncSaver` and `CheckpointStore`: flushed, read back from the disk and compared;
  torch.save, safetensors     the functions, on tensors copied to the host;
  DCP                         `torch.distributed.checkpoint.save` on tensors copied to the host;
  Lightning                   `TorchCheckpointIO.save_checkpoint`, likewise.
None of the last four flushes or reads anything back (DCP flushes). The limits beside them: the copy to the host alone,
which any save must wait for, and the same bytes written to the disk and flushed. All of them run in every round;
before each the disk is let finish what it has to do. Medians over the rounds, per gigabyte (10^9 bytes).
"""

from __future__ import annotations

import functools
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io import TorchCheckpointIO
from safetensors.torch import save_file
from torch.distributed import checkpoint as dcp

from benchmarks import report
from benchmarks.children import run_in_child
from xla_adapters import get_backend, initialize
from xla_adapters.checkpoint import AsyncSaver, CheckpointStore, snapshot

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
    """The disk's own speed."""
    with (folder / "raw").open("wb", buffering=0) as stream:
        for tensor in state.values():
            stream.write(memoryview(tensor.numpy()).cast("B"))
        os.fsync(stream.fileno())


def write_shards(state: State, folder: Path) -> None:
    dcp.save(dict(state), checkpoint_id=folder / "sharded", no_dist=True)


def write_torch(state: State, folder: Path) -> None:
    torch.save(state, folder / "state.pt")


def write_safetensors(state: State, folder: Path) -> None:
    save_file(state, folder / "model.safetensors")


def write_lightning(state: State, folder: Path) -> None:
    TorchCheckpointIO().save_checkpoint({"state_dict": state}, folder / "model.ckpt")


def peer(write: Callable[[State, Path], None], state: State, folder: Path) -> tuple[float, float]:
    """Copies and writes; the loop is blocked all the time."""
    started = time.perf_counter()
    write(snapshot(state), folder)
    seconds = time.perf_counter() - started
    return seconds, seconds


def copy_only(state: State, folder: Path) -> tuple[float, float]:
    started = time.perf_counter()
    get_backend().to_host(list(state.values()))
    seconds = time.perf_counter() - started
    return seconds, seconds


def disk_only(state: State, folder: Path) -> tuple[float, float]:
    copied = snapshot(state)
    started = time.perf_counter()
    write_and_flush(copied, folder)
    seconds = time.perf_counter() - started
    return seconds, seconds


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
    "torch.save": functools.partial(peer, write_torch),
    "safetensors": functools.partial(peer, write_safetensors),
    "DCP": functools.partial(peer, write_shards),
    "Lightning": functools.partial(peer, write_lightning),
}


def measure(megabytes: int, rounds: int, where: Path) -> dict[str, list[tuple[float, float]]]:
    """Runs in a child: seconds blocked and in all, of every run in every round."""
    initialize()
    state = state_of(megabytes)
    get_backend().flush()
    get_backend().wait()
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in RUNS}
    for number in range(rounds):
        for name in RUNS if number % 2 == 0 else reversed(RUNS):
            folder = Path(tempfile.mkdtemp(dir=where))
            os.sync()
            times[name].append(RUNS[name](state, folder))
            shutil.rmtree(folder)
    return times


def main(arguments: list[str] | None = None) -> int:
    options_parser = report.parser(__doc__ or "")
    options_parser.add_argument("--megabytes", type=int, default=480, help="size of the state (480)")
    options_parser.add_argument("--rounds", type=int, default=5, help="how often each is run (5)")
    options_parser.add_argument("--folder", type=Path, default=Path("runs"), help="on the disk to be used (runs)")
    options = options_parser.parse_args(arguments)
    options.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.folder) as where:
        outcome = run_in_child(
            functools.partial(measure, options.megabytes, options.rounds, Path(where)), timeout=60 * options.rounds
        )
    if not outcome.ok:
        print(outcome.error, file=sys.stderr)
        return 1
    gigabytes = options.megabytes / 1000
    rows: list[dict[str, Any]] = []
    for name, times in outcome.value.items():
        blocked, total = (statistics.median(pair[which] for pair in times) / gigabytes for which in (0, 1))
        rows.append({"run": name, "blocked_seconds_per_gb": blocked, "total_seconds_per_gb": total})
    print(report.table(("run", "blocked s/GB", "in all s/GB"), [tuple(row.values()) for row in rows]))
    # Of the same round: the machine may be busier in another.
    ratios = [ours[0] / copy[0] for ours, copy in zip(outcome.value[ASYNC], outcome.value[COPY], strict=True)]
    result = report.Report("checkpoint", {"megabytes": options.megabytes, "rounds": options.rounds}, {"rows": rows})
    result.target("blocked by an async save, to the copy to the host", statistics.median(ratios), "at most", 1.2)
    print(f"\nblocked by an async save: {statistics.median(ratios):.2f} times the copy to the host")
    return result.finish(options)


if __name__ == "__main__":
    sys.exit(main())
