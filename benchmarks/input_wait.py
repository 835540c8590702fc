"""What is left of the time that a loader takes; `python -m benchmarks.input_wait`.

A GPT-2 is trained without and with a loader that takes as long as a step (it sleeps), in turn; medians over the rounds:
with stock transformers, which reads in a thread; with ours, which reads in the thread that trains while the device
computes; and with ours and one worker process (`dataloader_num_workers=1`).
  left   seconds of a step with the loader less those without, divided by what the loader takes. 1 where the device
         waits for the loader, 0 where batches are read while it computes.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from functools import partial
from typing import Any

os.environ.setdefault("PJRT_DEVICE", "CPU")
os.environ["XLA_ADAPTERS_CACHE_DIR"] = "off"

import torch
import transformers
from transformers import TrainerCallback

import hf_trainer
from benchmarks import report
from benchmarks.sizes import Size
from benchmarks.training import Batches, arguments, only_item
from tests.children import run_in_child
from xla_adapters import XLAConfig, get_runtime, initialize

LIMIT = 0.1
_SKIPPED = 15


class _Steps(TrainerCallback):
    """Notes when the first and the last of the timed steps have ended."""

    def __init__(self, steps: int) -> None:
        self._last = _SKIPPED + steps
        self.times: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step in (_SKIPPED, self._last):
            get_runtime().device.wait()
            self.times.append(time.perf_counter())


def seconds_per_step(size: Size, steps: int, delay: float, *, stock: bool, workers: int = 0) -> float:
    """Seconds of a step, with a loader that takes a time.

    Args:
        size: of the model.
        steps: how many are timed.
        delay: seconds for each batch.
        stock: whether stock transformers trains.
        workers: processes that read.
    """
    initialize(eager=not stock, keep_memory=False if stock else None)

    def collate(samples: list[Any]) -> Any:
        time.sleep(delay)
        return only_item(samples)

    timed = _Steps(steps)
    with tempfile.TemporaryDirectory() as folder:
        common: dict[str, Any] = {
            "model": size.model(),
            "args": arguments(folder, logging_steps=10**6, optim="adamw_torch", dataloader_num_workers=workers),
            "train_dataset": Batches(size.batches(_SKIPPED + steps)),
            "data_collator": collate,
            "callbacks": [timed],
        }
        if stock:
            transformers.Trainer(**common).train()
        else:
            # Verifications, of which so few steps would have many, have a benchmark of their own.
            hf_trainer.Trainer(**common, xla_args=XLAConfig(replay_verify_every=None)).train()
    first, last = timed.times
    return (last - first) / steps


def main(given: list[str] | None = None) -> int:
    """Measures, prints, checks."""
    parser = report.parser("What is left of a loader's time.")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(given)
    torch.set_num_threads(1)
    size = Size(4, 128)
    kinds: dict[str, dict[str, Any]] = {
        "stock": {"stock": True},
        "ours": {"stock": False},
        "ours, a worker": {"stock": False, "workers": 1},
    }
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in kinds}
    for _ in range(options.rounds):
        for name, pairs in found.items():
            run = partial(seconds_per_step, size, options.steps, **kinds[name])
            without = run_in_child(partial(run, 0.0), timeout=600).result()
            pairs.append((without, run_in_child(partial(run, without), timeout=600).result()))
    left = {
        name: statistics.median((slow - without) / without for without, slow in pairs) for name, pairs in found.items()
    }
    rows = [
        (name, *(1e3 * statistics.median(values) for values in zip(*pairs, strict=True)), left[name])
        for name, pairs in found.items()
    ]
    print(report.table(("trainer", "ms a step", "with the loader", "left"), rows))
    made = report.Report(
        "input_wait",
        settings={"size": str(size), "steps": options.steps, "rounds": options.rounds},
        results={"pairs": found},
    )
    for name in kinds:
        if name != "stock":
            made.target(f"{name}: what is left of a loader's time", left[name], "at most", LIMIT)
    return made.finish(options)


if __name__ == "__main__":
    sys.exit(main())
