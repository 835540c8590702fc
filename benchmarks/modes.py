"""Throughput of the modes on a small decoder; `python -m benchmarks.modes`.

Each run is in its own process, and every round has all runs, so that changes in the machine's load affect all of them:
  eager, lazy, eager+compile, eager+dynamo   our Trainer with that `xla_mode`;
  stock lazy                                 transformers.Trainer on XLA, optim="adamw_torch";
  plain CPU                                  a loop of torch on the CPU without XLA: no Trainer around it.
Only steps after the warm-up are timed (compiling falls into the warm-up and is reported apart); the
device is waited for at both ends. Nothing is logged in between. CPU time is that of the whole
process, all threads. Medians over the rounds; where processes share cores, compare CPU time.

RFC pytorch/xla#7253 reports on its TPU 65 : 147 : 147 tokens/s for eager : lazy : eager+compile.
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
from benchmarks import report
from benchmarks.children import run_in_child
from benchmarks.training import LEARNING_RATE, Batches, arguments, only_item, token_batches
from benchmarks.zoo_batches import Batch
from xla_adapters import get_runtime, initialize

OUR_MODES = ("eager", "lazy", "eager+compile", "eager+dynamo")
STOCK, PLAIN = "stock lazy", "plain CPU"
RUNS = (*OUR_MODES, STOCK, PLAIN)


@dataclass(frozen=True)
class Settings:
    """The model, the batches, and how much of it."""

    width: int = 128
    layers: int = 2
    length: int = 64
    batch: int = 8
    vocabulary: int = 256
    warmup: int = 3
    steps: int = 30

    @property
    def tokens_per_step(self) -> int:
        return self.batch * self.length

    def model(self) -> transformers.PreTrainedModel:
        """A Llama-like decoder."""
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.width,
            intermediate_size=3 * self.width,
            num_hidden_layers=self.layers,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=self.length,
        )
        return transformers.LlamaForCausalLM(config)

    def batches(self) -> list[Batch]:
        """Random tokens that predict themselves."""
        return token_batches(self.warmup + self.steps, (self.batch, self.length), self.vocabulary)


@dataclass
class Timing:
    """One run's measured stretch."""

    wall_seconds: float
    cpu_seconds: float
    compile_seconds: float
    compiles_after_warmup: int
    last_loss: float


@dataclass
class Stopwatch(transformers.TrainerCallback):
    """Times from the end of the warm-up to the end of the last step, and waits for the device at both.

    Args:
        warmup, steps: where it starts and how long it runs, in steps.
        wait: blocks until everything that was begun is computed.
        compiled: compiles so far, and the seconds they took.
    """

    warmup: int
    steps: int
    wait: Callable[[], None]
    compiled: Callable[[], tuple[int, float]]
    marks: list[tuple[float, float, int]] = field(default_factory=list)

    def on_step_end(self, args: Any, state: transformers.TrainerState, control: Any, **_: Any) -> None:
        self.step_done(state.global_step)

    def step_done(self, number: int) -> None:
        """Tells that step `number`, from 1, is done."""
        if number in (self.warmup, self.warmup + self.steps):
            self.wait()
            self.marks.append((time.perf_counter(), time.process_time(), self.compiled()[0]))

    def timing(self, last_loss: float) -> Timing:
        """The difference of the two marks."""
        (wall, cpu, compiles), (wall_end, cpu_end, compiles_end) = self.marks
        return Timing(wall_end - wall, cpu_end - cpu, self.compiled()[1], compiles_end - compiles, last_loss)


def run_trainer(name: str, settings: Settings) -> Timing:
    """Runs in a child: our Trainer in a mode, or the stock one."""
    initialize(eager=False)
    runtime = get_runtime()

    def compiled() -> tuple[int, float]:
        # Eager operations are compiled too, one by one; they count as graphs do.
        metrics = runtime.counters.metrics()
        return metrics.compiles + metrics.eager_compiles, metrics.compile_seconds

    def wait() -> None:
        # A lazy trainer may leave the last step pending at this point: then it is not done.
        if not runtime.tracing.eager() and runtime.tracing.pending_count():
            runtime.tracing.flush()
        runtime.device.wait()

    stopwatch = Stopwatch(settings.warmup, settings.steps, wait, compiled)
    total = settings.warmup + settings.steps
    with tempfile.TemporaryDirectory() as folder:
        common: dict[str, Any] = {
            "model": settings.model(),
            "args": arguments(folder, logging_steps=total, **({"optim": "adamw_torch"} if name == STOCK else {})),
            "train_dataset": Batches(settings.batches()),
            "data_collator": only_item,
            "callbacks": [stopwatch],
        }
        trainer = transformers.Trainer(**common) if name == STOCK else hf_trainer.Trainer(**common, xla_mode=name)
        result = trainer.train()
    return stopwatch.timing(result.training_loss)


def run_plain(settings: Settings) -> Timing:
    """Runs in a child: torch on the CPU; XLA is never started."""
    stopwatch = Stopwatch(settings.warmup, settings.steps, lambda: None, lambda: (0, 0.0))
    model = settings.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    model.train()
    losses = []
    for number, batch in enumerate(settings.batches(), start=1):
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        stopwatch.step_done(number)
    return stopwatch.timing(float(torch.stack(losses).mean()))


@dataclass
class Result:
    """The timings of all rounds of one run."""

    name: str
    timings: list[Timing] = field(default_factory=list)
    error: str | None = None

    def median(self, attribute: str) -> float | None:
        """Over the rounds; `None` if there is none, or one of them failed."""
        if self.error is not None or not self.timings:
            return None
        return statistics.median(getattr(timing, attribute) for timing in self.timings)

    def rate(self, settings: Settings, attribute: str = "wall_seconds") -> float | None:
        """Tokens per second."""
        seconds = self.median(attribute)
        return None if not seconds else settings.tokens_per_step * settings.steps / seconds


def measure(names: list[str], settings: Settings, rounds: int, timeout: float) -> dict[str, Result]:
    """Measures all runs, interleaved."""
    results = {name: Result(name) for name in names}
    for number in range(1, rounds + 1):
        # Every other round is in reverse order, since the first run finds a machine that has just rested.
        for name in names if number % 2 else reversed(names):
            if results[name].error is not None:
                continue
            function = (
                functools.partial(run_plain, settings)
                if name == PLAIN
                else functools.partial(run_trainer, name, settings)
            )
            outcome = run_in_child(function, timeout=timeout)
            if outcome.ok:
                results[name].timings.append(outcome.value)
            else:
                results[name].error = outcome.short_error
            print(f"round {number}/{rounds}: {name}: {outcome.seconds:.0f} s", file=sys.stderr, flush=True)
    return results


def ratio(a: float | None, b: float | None) -> float | None:
    """`a / b`, if both are known."""
    return None if a is None or not b else a / b


def table_of(results: dict[str, Result], settings: Settings) -> str:
    """The runs for a person; errors stand below."""
    eager, stock = (results[name].rate(settings) if name in results else None for name in ("eager", STOCK))
    rows = []
    for result in results.values():
        rate, wall, cpu = result.rate(settings), result.median("wall_seconds"), result.median("cpu_seconds")
        walls = [timing.wall_seconds for timing in result.timings]
        rows.append(
            (
                result.name,
                rate,
                ratio(rate, eager),
                ratio(rate, stock),
                None if wall is None else 1000 * wall / settings.steps,
                None if cpu is None else 1000 * cpu / settings.steps,
                None if wall is None else 100 * (max(walls) - min(walls)) / wall,
                result.median("compile_seconds"),
                result.median("compiles_after_warmup"),
                result.median("last_loss"),
            )
        )
    headers = (
        "run",
        "tokens/s",
        "to eager",
        "to stock lazy",
        "wall ms/step",
        "CPU ms/step",
        "spread of wall %",
        "graphs compiled s",
        "compiles while timed",
        "mean loss",
    )
    failed = [f"  {result.name}: {result.error}" for result in results.values() if result.error]
    return report.table(headers, rows) + ("\n" + "\n".join(failed) if failed else "")


def add_targets(made: report.Report, results: dict[str, Result], settings: Settings) -> None:
    """How the compiled step must stand to the others; a run that failed misses them."""
    rates = {name: result.rate(settings) for name, result in results.items()}
    for other, limit in (("lazy", 0.95), (STOCK, 0.95), ("eager", 2.0)):
        name = f"tokens/s of eager+compile against {other if other == STOCK else 'our ' + other}"
        made.target(name, ratio(rates.get("eager+compile"), rates.get(other)), "at least", limit)


def main(command: list[str] | None = None) -> int:
    """The program."""
    parser = report.parser(str(__doc__).splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--timeout", type=float, default=300, help="seconds per run")
    parser.add_argument("--runs", default=",".join(RUNS), help=f"comma-separated, of: {', '.join(RUNS)}")
    for name, value in asdict(Settings()).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args(command)
    settings = Settings(**{name: getattr(options, name) for name in asdict(Settings())})
    names = [name.strip() for name in options.runs.split(",")]
    if unknown := sorted(set(names) - set(RUNS)):
        parser.error(f"unknown runs: {', '.join(unknown)}; there are {', '.join(RUNS)}")
    results = measure(names, settings, options.rounds, options.timeout)
    made = report.Report("modes", settings={**asdict(settings), "rounds": options.rounds})
    made.results["runs"] = [asdict(result) for result in results.values()]
    made.results["tokens_per_second"] = {name: result.rate(settings) for name, result in results.items()}
    add_targets(made, results, settings)
    print(str(__doc__).split("\n\n", 1)[1])
    print(f"{settings}, {options.rounds} rounds\n")
    print(table_of(results, settings))
    return made.finish(options)


if __name__ == "__main__":
    sys.exit(main())
