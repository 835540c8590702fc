"""What a training step costs the host, by depth and width; `python -m benchmarks.host_overhead`.

Runs, each in a process of its own, one after another in every round:
  stock         transformers.Trainer on XLA, optim="adamw_torch";
  traced        our Trainer with step_replay=False;
  replayed      our Trainer;
  lazy loop     a loop by hand with torch_xla.sync() at each step;
  step          the same loop as a CompiledStep.
Host CPU is that of the main thread, process CPU that of all threads; medians over the steps behind the
warm-up, then over the rounds. Nothing is logged while it is timed.
"""

from __future__ import annotations

import functools
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import transformers

import hf_trainer
from benchmarks import report, zoo
from benchmarks.children import run_in_child
from benchmarks.training import LEARNING_RATE, Batches, arguments, only_item, token_batches
from xla_adapters import CompiledStep, get_backend, initialize

RUNS = ("stock", "traced", "replayed", "lazy loop", "step")
# Parts of the stock trainer's host CPU and wall that ours may cost.
_HOST_LIMIT, _WALL_LIMITS = 1 / 15, {2: 0.35, 12: 0.1}


@dataclass(frozen=True)
class Settings:
    """The models, the batches, and how many."""

    depths: str = "2x128,12x32"
    length: int = 64
    batch: int = 8
    vocabulary: int = 256
    warmup: int = 8
    steps: int = 20

    def sizes(self) -> list[tuple[int, int]]:
        """Layers and width of each model."""
        return [(int(layers), int(width)) for layers, width in (item.split("x") for item in self.depths.split(","))]

    def model(self, layers: int, width: int) -> transformers.PreTrainedModel:
        """A GPT-2 with dropout."""
        torch.manual_seed(0)
        config = transformers.GPT2Config(
            vocab_size=self.vocabulary,
            n_positions=self.length,
            n_embd=width,
            n_layer=layers,
            n_head=2,
            bos_token_id=0,
            eos_token_id=0,
        )
        return transformers.GPT2LMHeadModel(config)

    def batches(self) -> list[zoo.Batch]:
        """Random tokens that predict themselves."""
        return token_batches(self.warmup + self.steps, (self.batch, self.length), self.vocabulary)


@dataclass
class Clock(transformers.TrainerCallback):
    """Notes the clocks at the end of each step."""

    marks: list[tuple[float, float, float]] = field(default_factory=list)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.step_done()

    def step_done(self) -> None:
        """Tells that a step has ended."""
        self.marks.append((time.thread_time(), time.process_time(), time.perf_counter()))

    def medians(self, warmup: int) -> list[float]:
        """Milliseconds per step of host CPU, process CPU and wall."""
        pairs = list(zip(self.marks[warmup - 1 :], self.marks[warmup:], strict=False))
        return [1000 * statistics.median(after[kind] - before[kind] for before, after in pairs) for kind in range(3)]


@dataclass
class Timing:
    """One run."""

    host_ms: float
    process_ms: float
    wall_ms: float
    compiles: int
    executions: float
    last_loss: float


def run(name: str, settings: Settings, layers: int, width: int) -> Timing:
    """Runs in a child."""
    initialize()
    backend = get_backend()
    if name != "stock":
        assert backend.replay_works
    clock = Clock()
    before = backend.metrics()
    loss = (_run_trainer if name in ("stock", "traced", "replayed") else _run_loop)(
        name, settings, settings.model(layers, width), clock
    )
    after = backend.metrics()
    return Timing(
        *clock.medians(settings.warmup),
        compiles=after.compiles - before.compiles,
        executions=(after.executions - before.executions) / (settings.warmup + settings.steps),
        last_loss=loss,
    )


def _run_trainer(name: str, settings: Settings, model: transformers.PreTrainedModel, clock: Clock) -> float:
    total = settings.warmup + settings.steps
    with tempfile.TemporaryDirectory() as folder:
        common: dict[str, Any] = {
            "model": model,
            "args": arguments(folder, logging_steps=total, optim="adamw_torch"),
            "train_dataset": Batches(settings.batches()),
            "data_collator": only_item,
            "callbacks": [clock],
        }
        if name == "stock":
            trainer: Any = transformers.Trainer(**common)
        else:
            trainer = hf_trainer.Trainer(**common, step_replay=name == "replayed" and "auto")
        return float(trainer.train().training_loss)


def _run_loop(name: str, settings: Settings, model: transformers.PreTrainedModel, clock: Clock) -> float:
    import torch_xla

    model.to("xla").train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)

    def body(batch: zoo.Batch) -> torch.Tensor:
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()  # type: ignore[no-any-return]

    step: Callable[[zoo.Batch], torch.Tensor] = CompiledStep(body) if name == "step" else body
    losses = []
    for batch in settings.batches():
        losses.append(step({key: value.to("xla") for key, value in batch.items()}))
        if name == "lazy loop":
            torch_xla.sync()
        clock.step_done()
    return float(torch.stack([loss.cpu() for loss in losses]).mean())


def main(command: list[str] | None = None) -> int:
    """The program."""
    parser = report.parser(str(__doc__).splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--timeout", type=float, default=600, help="seconds per run")
    parser.add_argument("--runs", default=",".join(RUNS), help=f"comma-separated, of: {', '.join(RUNS)}")
    for name, value in asdict(Settings()).items():
        parser.add_argument(f"--{name}", type=type(value), default=value)
    options = parser.parse_args(command)
    settings = Settings(**{name: getattr(options, name) for name in asdict(Settings())})
    names = [name.strip() for name in options.runs.split(",")]
    if unknown := sorted(set(names) - set(RUNS)):
        parser.error(f"unknown runs: {', '.join(unknown)}; there are {', '.join(RUNS)}")
    timings: dict[tuple[int, int, str], list[Timing]] = {}
    failed = []
    for number in range(1, options.rounds + 1):
        for layers, width in settings.sizes():
            for name in names if number % 2 else reversed(names):
                outcome = run_in_child(functools.partial(run, name, settings, layers, width), timeout=options.timeout)
                if outcome.ok:
                    timings.setdefault((layers, width, name), []).append(outcome.value)
                else:
                    failed.append(f"  {layers}x{width} {name}: {outcome.short_error}")
                print(f"round {number}: {layers}x{width} {name}: {outcome.seconds:.0f} s", file=sys.stderr, flush=True)

    def median(layers: int, width: int, name: str, what: str) -> float | None:
        found = timings.get((layers, width, name))
        return statistics.median(getattr(timing, what) for timing in found) if found else None

    kinds = ("host_ms", "process_ms", "wall_ms", "compiles", "executions", "last_loss")
    rows = [
        (f"{layers}x{width}", name, *(median(layers, width, name, kind) for kind in kinds))
        for layers, width in settings.sizes()
        for name in names
    ]
    made = report.Report("host_overhead", settings={**asdict(settings), "rounds": options.rounds})
    made.results["runs"] = [
        {"layers": layers, "width": width, "run": name, "timings": [asdict(timing) for timing in found]}
        for (layers, width, name), found in timings.items()
    ]
    for layers, width in settings.sizes():
        for kind, limit in (("host_ms", _HOST_LIMIT), ("wall_ms", _WALL_LIMITS.get(layers))):
            ours, stock = median(layers, width, "replayed", kind), median(layers, width, "stock", kind)
            if limit is not None and (kind == "wall_ms" or layers >= 12):
                part = None if ours is None or not stock else ours / stock
                made.target(f"{kind} of replayed against stock, {layers}x{width}", part, "at most", limit)
        for kind in ("compiles", "executions"):
            made.target(f"{kind}, {layers}x{width}", median(layers, width, "replayed", kind), "at most", 1)
    print(str(__doc__).split("\n\n", 1)[1])
    print(f"{settings}, {options.rounds} rounds\n")
    headers = ("model", "run", "host CPU ms", "process CPU ms", "wall ms", "compiles", "executions/step", "mean loss")
    print(report.table(headers, rows) + ("\n" + "\n".join(failed) if failed else ""))
    return made.finish(options)


if __name__ == "__main__":
    sys.exit(main())
