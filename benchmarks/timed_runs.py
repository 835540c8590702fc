"""All runs that are timed, by name, for a transformer; and how a program takes them side by side."""

from __future__ import annotations

import argparse
import functools
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks import rolled, timed_loops, timed_trainers
from benchmarks.clock import Plan, Timing
from benchmarks.deep_models import GPT2, Size
from benchmarks.turns import PassOn, take_turns
from xla_adapters import initialize
from xla_adapters.backend.compiler_flags import keep_no_barriers, leave_temporary_memory_whole
from xla_adapters.backend.host_memory import LARGEST_PIECE

JAX = "JAX"
ON_ONE_CORE = " on 1 core"
COMPILED_FAST = " compiled fast"
DEVICE_RUNS = (*timed_trainers.RUNS, *timed_loops.XLA_RUNS, JAX)


@dataclass
class Found:
    """What runs of one model came to.

    Attributes:
        timings: by the name of the run.
        failed: why the others have none.
    """

    timings: dict[str, Timing] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def get(self, name: str, what: str) -> float | None:
        """A figure of a run, if it was measured."""
        return getattr(self.timings[name], what) if name in self.timings else None

    def best(self, names: Sequence[str], what: str) -> float | None:
        """The least among runs."""
        return min((value for name in names if (value := self.get(name, what)) is not None), default=None)

    def ratio(self, name: str, other: str, what: str) -> float | None:
        """A run's figure divided by another's."""
        return divided(self.get(name, what), self.get(other, what))

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return {"timings": {name: asdict(timing) for name, timing in self.timings.items()}, "failed": self.failed}


def divided(one: float | None, other: float | None) -> float | None:
    """One by the other, if both are known."""
    return None if one is None or not other else one / other


def missing(name: str, size: Size) -> str | None:
    """Why a run cannot be made here, if so."""
    if name.removesuffix(ON_ONE_CORE) != JAX:
        return None
    if importlib.util.find_spec("jax") is None:
        return "not measured: jax is not installed (pip install 'xla-adapters[bench]')"
    return None if size.family == GPT2 else f"not measured: {JAX}'s model is {GPT2}"


def run(name: str, size: Size, plan: Plan, pass_on: PassOn) -> Timing:
    """Runs in a child.

    Args:
        name: one of `DEVICE_RUNS`, or of the loops on the host; with `ON_ONE_CORE` behind it, on one core;
            with `COMPILED_FAST`, after `initialize(fast_compile=True)`.
        size: the model.
        plan, pass_on: see `Clock`.
    """
    if name.endswith(ON_ONE_CORE):
        # Before the runtime starts its threads.
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
        name = name.removesuffix(ON_ONE_CORE)
    if name.endswith(COMPILED_FAST):
        name = name.removesuffix(COMPILED_FAST)
        is_ours = name in timed_loops.OURS or (name in timed_trainers.RUNS and name not in timed_trainers.STOCK)
        initialize(fast_compile=True, keep_memory=None if is_ours else False)
    if name == JAX:
        from benchmarks import jax_gpt2

        # What importing ours has said to XLA is not for its peers. Those on torch_xla take back what is said of memory
        # as they start, and have no barriers.
        leave_temporary_memory_whole(LARGEST_PIECE)
        keep_no_barriers()
        return jax_gpt2.run(size, plan, pass_on)
    if name in rolled.RUNS:
        return rolled.run(name, size.model, size.batches(plan.total), plan, pass_on)
    group = timed_trainers if name in timed_trainers.RUNS else timed_loops
    return group.run(name, size.model, size.batches(plan.total), plan, pass_on)


def measure(
    runs: dict[str, Callable[[PassOn], Timing]], rounds: int, timeout: float, title: str, failed: dict[str, str]
) -> Found:
    """Takes runs side by side, and says so.

    Args:
        runs: by name.
        rounds: blocks of each.
        timeout: seconds for one turn.
        title: what is measured.
        failed: runs that are left out, with the reason.
    """
    found = Found(failed=dict(failed))
    for name, why in failed.items():
        say(f"{title}: {name}: {why}")
    outcomes = take_turns(runs, rounds, timeout=timeout, say=lambda line: say(f"{title}: {line}"))
    for name, outcome in outcomes.items():
        if outcome.ok:
            found.timings[name] = outcome.value
        else:
            found.failed[name] = str(outcome.short_error)
    return found


def measure_transformer(names: Sequence[str], size: Size, plan: Plan, timeout: float) -> Found:
    """The named runs of a model."""
    left_out = {name: why for name in names if (why := missing(name, size)) is not None}
    runs = {name: functools.partial(run, name, size, plan) for name in names if name not in left_out}
    return measure(runs, plan.rounds, timeout, str(size), left_out)


def say(line: str) -> None:
    """Progress."""
    print(line, file=sys.stderr, flush=True)


def add_options(parser: argparse.ArgumentParser, names: Sequence[str], plan: Plan, *, timeout: float) -> None:
    """What such a program can be told."""
    parser.add_argument("--runs", default=",".join(names), help=f"comma-separated, of: {', '.join(names)}")
    parser.add_argument("--warmup", type=int, default=plan.warmup, help="steps before anything is timed")
    parser.add_argument("--steps", type=int, default=plan.steps, help="steps of a run in each round")
    parser.add_argument("--rounds", type=int, default=plan.rounds)
    parser.add_argument("--timeout", type=float, default=timeout, help="seconds for one turn of a run")


def chosen(
    parser: argparse.ArgumentParser, options: argparse.Namespace, known: Sequence[str]
) -> tuple[list[str], Plan]:
    """The runs and the plan that were asked for."""
    names = [name.strip() for name in options.runs.split(",")]
    if unknown := sorted(set(names) - set(known)):
        parser.error(f"unknown runs: {', '.join(unknown)}; there are {', '.join(known)}")
    return names, Plan(options.warmup, options.steps, options.rounds)
