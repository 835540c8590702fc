"""The cost of verifying replays; `python -m benchmarks.verification`.

After 8, 16, ... 1,024 replays, and then every `replay_verify_every`, a step is traced and compared with its replay. Two
loops train the same GPT-2 for the same number of steps. The first does not verify, and does not wait for steps: it
measures the wall time without verification. The second verifies and waits for each step: the cost of a verification is
the time of its step minus that of the median replay.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks import report
from benchmarks.sizes import Size
from benchmarks.timed_loops import LEARNING_RATE, joined, parts
from benchmarks.zoo import Batch
from xla_adapters import CompiledStep, XLAConfig, get_runtime, initialize

LIMIT = 0.03
_WARMUP = 6


def _step(size: Size, every: int | None) -> CompiledStep[torch.Tensor]:
    model: Any = size.model().train().to("xla")
    model.tie_weights()
    loss_and_update = parts(model, torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0))
    return CompiledStep(joined(*loss_and_update), config=XLAConfig(replay_verify_every=every))


def _batch(size: Size) -> Batch:
    return {name: value.to("xla") for name, value in size.batches(1)[0].items()}


def _timed(one: Callable[[], object]) -> float:
    start = time.perf_counter()
    one()
    return time.perf_counter() - start


def without_verification(size: Size, steps: int) -> float:
    """Seconds of so many steps without verification."""
    step, batch = _step(size, None), _batch(size)
    for _ in range(_WARMUP):
        step(batch)
    get_runtime().device.wait()

    def run() -> None:
        for _ in range(steps):
            step(batch)
        get_runtime().device.wait()

    seconds = _timed(run)
    if step.replays < steps:
        raise RuntimeError(f"replayed {step.replays} times only: {step.reasons}")
    return seconds


def of_verified_steps(size: Size, steps: int, every: int) -> tuple[list[float], float]:
    """Seconds of each verified step, and of the median replay, in a training of so many steps."""
    step, batch = _step(size, every), _batch(size)
    replays, verified = [], []

    def one() -> None:
        step(batch)
        get_runtime().device.wait()

    for number in range(steps):
        before = step.replays
        seconds = _timed(one)
        if step.replays > before:
            replays.append(seconds)
        elif number >= _WARMUP:
            verified.append(seconds)
    return verified, statistics.median(replays)


def main() -> int:
    """Measures, prints, checks."""
    parser = report.parser("What verifying replays costs, of a training's wall time.")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--every", type=int, default=XLAConfig().replay_verify_every)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=32)
    options = parser.parse_args()
    size = Size(options.layers, options.width)
    initialize(keep_memory=None)
    total = without_verification(size, options.steps)
    verified, replay = of_verified_steps(size, options.steps, options.every)
    cost = sum(verified) - len(verified) * replay
    share = cost / (total + cost)
    rows = [(str(size), options.steps, total, len(verified), 1e3 * replay, 1e3 * statistics.mean(verified), share)]
    print(report.table(("model", "steps", "s", "verified", "ms a replay", "ms a verified step", "share"), rows))
    made = report.Report(
        "verification",
        settings={"size": str(size), "steps": options.steps, "every": options.every},
        results={"seconds": total, "verified": verified, "replay": replay, "share": share},
    )
    made.target(f"{size}: share of verified steps in {options.steps:,} steps", share, "at most", LIMIT)
    return made.finish(options)


if __name__ == "__main__":
    sys.exit(main())
