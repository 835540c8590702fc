"""All timed runs of a model by name, and functions that run them, interleaved or one after another."""

from __future__ import annotations

import argparse
import functools
import importlib.util
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from benchmarks import report, timed_loops, timed_trainers
from benchmarks.harness import Pause, Plan, Timing, run_interleaved
from benchmarks.sizes import FAMILIES, GPT2, Size, sizes
from xla_adapters import initialize
from xla_adapters.cpu.process_options import LARGEST_PIECE, keep_no_barriers, leave_temporary_memory_whole

JAX = "JAX"
ON_ONE_CORE = " on 1 core"
COMPILED_FAST = " compiled fast"
DEVICE_RUNS = (*timed_trainers.RUNS, *timed_loops.XLA_RUNS, JAX)


@dataclass
class Found:
    """The results of the runs of one model.

    Attributes:
        timings: by name of the run.
        failed: by name of a run without timing, the reason.
    """

    timings: dict[str, Timing] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def get(self, name: str, what: str) -> float | None:
        """A figure of a run; None if it was not measured."""
        return getattr(self.timings[name], what) if name in self.timings else None

    def best(self, names: Sequence[str], what: str) -> float | None:
        """The smallest value of a figure among runs; None if none was measured."""
        return min((value for name in names if (value := self.get(name, what)) is not None), default=None)

    def ratio(self, name: str, other: str, what: str) -> float | None:
        """A run's figure divided by another's."""
        return divided(self.get(name, what), self.get(other, what))

    def plain(self) -> dict[str, Any]:
        """The results as plain values for JSON."""
        return {"timings": {name: asdict(timing) for name, timing in self.timings.items()}, "failed": self.failed}


def divided(one: float | None, other: float | None) -> float | None:
    """The quotient; None if a value is missing."""
    return None if one is None or not other else one / other


def missing(name: str, size: Size) -> str | None:
    """Why a run is not possible here (a missing package, say); None if it is."""
    if name in timed_trainers.TRL_RUNS and (size.family not in FAMILIES or FAMILIES[size.family].images):
        return "not measured: TRL's SFTTrainer trains language models"
    if name in timed_trainers.TRL_RUNS and importlib.util.find_spec("trl") is None:
        return "not measured: trl is not installed (pip install 'xla-adapters[dev]')"
    if name.removesuffix(ON_ONE_CORE) != JAX:
        return size.missing
    if importlib.util.find_spec("jax") is None:
        return "not measured: jax is not installed (pip install 'xla-adapters[bench]')"
    return None if size.family == GPT2 else f"not measured: {JAX}'s model is {GPT2}"


def run(name: str, size: Size, plan: Plan, pause: Pause) -> Timing:
    """Runs in a child.

    Args:
        name: one of `DEVICE_RUNS`, or of the loops on the host; with `ON_ONE_CORE` behind it, on one core;
            with `COMPILED_FAST`, after `initialize(fast_compile=True)`.
        size: the model.
        plan, pause: see `Clock`.
    """
    if name.endswith(ON_ONE_CORE):
        # Before the runtime starts its threads.
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
        name = name.removesuffix(ON_ONE_CORE)
    if name.endswith(COMPILED_FAST):
        name = name.removesuffix(COMPILED_FAST)
        is_ours = name in timed_loops.OURS or name == timed_trainers.HF_REPLAYED
        initialize(eager=is_ours, fast_compile=True, keep_memory=None if is_ours else False)
    if name == JAX:
        from benchmarks import jax_gpt2

        # Importing this package has set XLA flags, which peers must not use.
        leave_temporary_memory_whole(LARGEST_PIECE)
        keep_no_barriers()
        return jax_gpt2.run(size, plan, pause)
    ours = (*timed_trainers.RUNS, *timed_trainers.NAMED_ONLY)
    group = timed_trainers if name in ours else timed_loops
    return group.run(name, size.model, size.batches(plan.total), plan, pause)


def measure(names: Sequence[str], size: Size, plan: Plan, timeout: float) -> Found:
    """Measures the named runs of a model, interleaved.

    Args:
        names: see `run`.
        size: the model.
        plan: the number of steps.
        timeout: seconds per block.
    """
    found = Found(failed={name: why for name in names if (why := missing(name, size)) is not None})
    for name, why in found.failed.items():
        say(f"{size}: {name}: {why}")
    runs = {name: functools.partial(run, name, size, plan) for name in names if name not in found.failed}
    outcomes = run_interleaved(runs, plan.rounds, timeout=timeout, say=lambda line: say(f"{size}: {line}"))
    for name, outcome in outcomes.items():
        if outcome.ok:
            found.timings[name] = outcome.value
        else:
            found.failed[name] = str(outcome.short_error)
    return found


# Of each run, one for each repeat.
Timings = dict[str, list[Timing]]


def median(timings: Timings, name: str, value: Callable[[Timing], Any]) -> float | None:
    """The median of a figure over the repeats; None if it was not measured."""
    values = [value(timing) for timing in timings.get(name, [])]
    return statistics.median(values) if values and None not in values else None


def measure_alone(
    names: Sequence[str], size: Size, plan: Plan, timeout: float, repeats: int
) -> tuple[Timings, list[str]]:
    """Measures runs one after another, each several times.

    Returns:
        The timings, and a line for each run that failed.
    """
    timings: Timings = {}
    failed: dict[str, None] = {}
    for repeat in range(repeats):
        for name in reversed(names) if repeat % 2 else names:
            found = measure([name], size, plan, timeout)
            if name in found.timings:
                timings.setdefault(name, []).append(found.timings[name])
            failed.update({f"  {size} {name}: {why}": None for why in found.failed.values()})
    return timings, list(failed)


def say(line: str) -> None:
    """Prints a progress message to stderr."""
    print(line, file=sys.stderr, flush=True)


def add_options(parser: argparse.ArgumentParser, names: Sequence[str], plan: Plan, *, timeout: float) -> None:
    """Adds the options for runs and numbers of steps."""
    parser.add_argument("--runs", default=",".join(names), help=f"comma-separated, of: {', '.join(names)}")
    parser.add_argument("--warmup", type=int, default=plan.warmup, help="steps before anything is timed")
    parser.add_argument("--steps", type=int, default=plan.steps, help="steps of a run in each round")
    parser.add_argument("--rounds", type=int, default=plan.rounds)
    parser.add_argument("--timeout", type=float, default=timeout, help="seconds for one turn of a run")


def add_sizes(parser: argparse.ArgumentParser, depths: str, *names: str, **values: int) -> None:
    """Adds the options for the models.

    Args:
        parser: gets the options.
        depths: the default, see `sizes`.
        names: of numbers of a `Size` that have an option, with its defaults.
        values: such numbers with other defaults.
    """
    parser.add_argument("--depths", default=depths, help="comma-separated LAYERSxWIDTH, or FAMILY LAYERSxWIDTH")
    for name in (*names, *values):
        default = values.get(name, getattr(Size(1, 1), name))
        parser.add_argument(f"--{name}", type=type(default), default=default)


def chosen_sizes(parser: argparse.ArgumentParser, options: argparse.Namespace, **values: Any) -> list[Size]:
    """The models from the options.

    Args:
        parser, options: of the program.
        values: of all models.
    """
    given = {field.name: getattr(options, field.name) for field in fields(Size) if hasattr(options, field.name)}
    try:
        return sizes(options.depths, **{**given, **values})
    except ValueError as error:
        parser.error(str(error))


def chosen(
    parser: argparse.ArgumentParser, options: argparse.Namespace, known: Sequence[str]
) -> tuple[list[str], Plan]:
    """The runs and the plan from the options."""
    names = report.names_in(parser, options.runs, known, between=",")
    return names, Plan(options.warmup, options.steps, options.rounds)
