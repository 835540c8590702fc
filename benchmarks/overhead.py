"""What the run report costs per replayed step; `python -m benchmarks.overhead --check`.

Each Trainer trains the same GPT-2 twice, with `xla_report` on and off, in two processes of which one at a time
computes. Blocks of both alternate; compared are the medians over the blocks. Both log the loss every 50 steps.
"""

from __future__ import annotations

import functools
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader

import hf_trainer
from benchmarks import report
from benchmarks.clock import Clock, Plan, Timing
from benchmarks.deep_models import Size, sizes
from benchmarks.interleaved import Pause, run_interleaved
from benchmarks.timed_trainers import HF_REPLAYED, LIGHTNING_REPLAYED, HFSteps, LightningSteps, Module
from benchmarks.training import MAX_NORM, Batches, arguments, only_item
from lightning_strategy import XLAEagerStrategy
from xla_adapters import XLAConfig, get_runtime, initialize

ON, OFF = "on", "off"
LIMIT = 0.01
_LOGS_EVERY = 50
# Without verifications, of which so few steps would have many.
_CONFIG = XLAConfig(replay_verify_every=None)


def _hf(model: torch.nn.Module, data: Batches, clock: Clock, folder: str, reports: bool) -> None:
    trainer = hf_trainer.Trainer(
        model=model,
        args=arguments(folder, logging_steps=_LOGS_EVERY, optim="adamw_torch", max_grad_norm=MAX_NORM),
        train_dataset=data,
        data_collator=only_item,
        callbacks=[HFSteps(clock)],
        xla_args=_CONFIG,
        xla_report=reports,
    )
    trainer.train()


class _Logging(Module):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss


def _lightning(model: torch.nn.Module, data: Batches, clock: Clock, folder: str, reports: bool) -> None:
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    trainer = L.Trainer(
        strategy=XLAEagerStrategy(_CONFIG, xla_report=reports),
        max_epochs=1,
        gradient_clip_val=MAX_NORM,
        callbacks=[LightningSteps(clock)],
        logger=CSVLogger(folder),
        log_every_n_steps=_LOGS_EVERY,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(_Logging(model.train()), DataLoader(data, batch_size=1, collate_fn=only_item))


_TRAININGS: dict[str, Callable[[torch.nn.Module, Batches, Clock, str, bool], None]] = {
    HF_REPLAYED: _hf,
    LIGHTNING_REPLAYED: _lightning,
}


def _run(trainer: str, reports: bool, size: Size, plan: Plan, pause: Pause) -> Timing:
    """Runs in a child."""
    initialize(keep_memory=None)
    runtime = get_runtime()
    # The first access executes two tiny graphs, which must not be counted.
    assert runtime.replay_works
    model = size.model()
    clock = Clock(plan, pause, runtime.device.wait)
    with tempfile.TemporaryDirectory() as folder:
        _TRAININGS[trainer](model, Batches(size.batches(plan.total)), clock, folder, reports)
    return clock.timing([])


def added(on: Timing, off: Timing) -> dict[str, float]:
    """What the report adds to a step, as a share: of wall time and of CPU time of the main thread."""
    return {"wall": on.wall_ms / off.wall_ms - 1, "host CPU": on.host_ms / off.host_ms - 1}


def measure(trainer: str, size: Size, plan: Plan, timeout: float) -> dict[str, Timing]:
    """The timings of a training with the report on and off.

    Raises:
        RuntimeError: a run failed.
    """
    runs = {name: functools.partial(_run, trainer, name == ON, size, plan) for name in (ON, OFF)}
    outcomes = run_interleaved(runs, plan.rounds, timeout=timeout, say=lambda line: print(line, file=sys.stderr))
    failed = [f"{name}: {outcome.error}" for name, outcome in outcomes.items() if not outcome.ok]
    if failed:
        raise RuntimeError("; ".join(failed))
    return {name: outcome.value for name, outcome in outcomes.items()}


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints, checks."""
    parser = report.parser("What the run report costs per replayed step.")
    parser.add_argument("--sizes", default="2x128")
    parser.add_argument("--steps", type=int, default=100, help="steps of a block")
    parser.add_argument("--rounds", type=int, default=15, help="blocks")
    parser.add_argument("--timeout", type=float, default=300, help="seconds of a block")
    options = parser.parse_args(argv)
    plan = Plan(steps=options.steps, rounds=options.rounds)
    made = report.Report("overhead", settings={"steps": plan.steps, "rounds": plan.rounds})
    rows = []
    for size in sizes(options.sizes):
        for trainer in _TRAININGS:
            timings = measure(trainer, size, plan, options.timeout)
            shares = added(timings[ON], timings[OFF])
            made.results[f"{size}, {trainer}"] = {name: asdict(timing) for name, timing in timings.items()}
            for name, share in shares.items():
                made.target(f"{size}, {trainer}: {name} added per step", share, "at most", LIMIT)
            for name, timing in timings.items():
                rows.append((str(size), trainer, name, timing.wall_ms, timing.host_ms, timing.executions))
    print(report.table(("model", "trainer", "report", "wall ms", "host CPU ms", "executions"), rows))
    return made.finish(options)


if __name__ == "__main__":
    sys.exit(main())
