"""The cost of checkpoints: how long the loop is blocked, and how long a save takes; `python -m benchmarks.checkpoint`.

A state of parameters and AdamW's two moments on the device, written by
  ours, async / ours, sync    `AsyncSaver` and `CheckpointStore`: flushed, read back from the disk and compared;
  torch.save, safetensors     the functions, on tensors copied to the host;
  DCP                         `torch.distributed.checkpoint.save` on tensors copied to the host;
  Lightning                   `TorchCheckpointIO.save_checkpoint`, likewise.
The last four do not read anything back, and only DCP flushes. Then trainers, stock and ours, save the same amount in a
training on the device (see `benchmarks.checkpoint_trainers`). For comparison: the copy to the host alone, which any
save must wait for, and the same bytes written to the disk and flushed. All of them run in every round; before each,
pending disk writes are flushed. Medians over the rounds, per gigabyte (10^9 bytes). The time that an async save blocks
is compared with the copy to the host in the same round and process.
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
from benchmarks.checkpoint_trainers import TRAINERS, players
from benchmarks.harness import run_interleaved
from tests.children import run_in_child
from xla_adapters import get_runtime, initialize
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
        trainers = [name.strip() for name in options.trainers.split(";") if name.strip()]
        unknown = [name for name in trainers if name not in TRAINERS]
        if unknown:
            parser.error(f"no such trainer: {', '.join(unknown)}; there are: {'; '.join(TRAINERS)}")
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
