"""Checks for typical user programs whether their training steps are replayed; `python -m benchmarks.replay_coverage`.

Each program of `tests/programs` is trained twice on the same data with the same seed, each time in its
own process: with step_replay="auto" and with step_replay=False.
  steps     calls of the training step; each micro batch is a call;
  replayed  calls that ran the executable without the step's Python;
  covered   of each kind of call that the step has, at most 6 were traced (two that agree, up to four more until a value
            is read), not counting verifications; and at least half of all calls were replayed;
  correct   both runs logged the same numbers, bit for bit, and ended with the same parameters and buffers.
A program that is not covered is listed with the reasons that the adapters give.
"""

from __future__ import annotations

import functools
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks import report
from tests.children import Outcome, run_in_children
from tests.programs import PROGRAMS, named
from tests.programs.program import Program, Ran
from xla_adapters.replay.verification import FIRST

WANTED = 30
# Calls of one kind before replays set in: two that agree, and four that may wait for a read.
_TRACED = 6


@dataclass
class Row:
    """One line of the table.

    Attributes:
        name, kind, stock, calls: see `Program`.
        steps, replays, reasons: of the run under `"auto"`, see `Ran`.
        difference: how the two runs differ; None if they do not.
        error: why a run did not come to its end, if so.
        seconds: what both took, with their compiles, from the first one's start to the last one's end.
    """

    name: str
    kind: str
    stock: bool
    calls: int
    steps: int | None = None
    replays: int | None = None
    reasons: dict[str, int] = field(default_factory=dict)
    difference: str | None = None
    error: str | None = None
    seconds: float = 0.0

    @property
    def correct(self) -> bool:
        """Whether both runs ended with equal results."""
        return self.error is None and self.difference is None and self.steps is not None

    @property
    def covered(self) -> bool:
        """Whether the steps were replayed, see above."""
        if self.error is not None or self.steps is None or self.replays is None:
            return False
        verified = sum(count <= self.replays for count in FIRST)
        return self.steps - self.replays <= (_TRACED + verified) * self.calls and 2 * self.replays >= self.steps


def difference(traced: Ran, auto: Ran) -> str | None:
    """The first thing in which a run differs from the one that was traced throughout, in words; None if nothing."""
    if traced.replays:
        return f"step_replay=False replayed {traced.replays} steps"
    if traced.steps != auto.steps:
        return f"{traced.steps} steps traced, {auto.steps} under auto"
    losses = sum("loss" in name for entry in traced.logged for name in entry)
    if losses < traced.steps // 2:
        return f"only {losses} losses were logged in {traced.steps} steps"
    if len(traced.logged) != len(auto.logged):
        return f"{len(traced.logged)} log entries traced, {len(auto.logged)} under auto"
    for index, (one, other) in enumerate(zip(traced.logged, auto.logged, strict=True)):
        if one.keys() != other.keys():
            return f"log entry {index} holds {sorted(one)} traced, {sorted(other)} under auto"
        # Not a number is equal to nothing, and no result to agree on.
        for name in (name for name, value in one.items() if value != other[name]):
            return f"log entry {index}: {name} is {one[name]!r} traced, {other[name]!r} under auto"
    return _different_weights(traced.weights, auto.weights)


def _different_weights(traced: dict[str, Any], auto: dict[str, Any]) -> str | None:
    if not traced or traced.keys() != auto.keys():
        return f"weights {sorted(traced)} traced, {sorted(auto)} under auto"
    for name, value in traced.items():
        other = auto[name]
        if value.dtype != other.dtype or value.shape != other.shape:
            return f"{name} is {value.dtype} {value.shape} traced, {other.dtype} {other.shape} under auto"
        if not np.array_equal(value, other):
            gap = np.abs(value.astype(np.float64) - other.astype(np.float64)).max()
            return f"{name} differs at the end by up to {gap:.2g}"
    return None


def measure(program: Program, timeout: float) -> Row:
    """Runs a program twice, at the same time; its errors are in the row."""
    row = Row(program.name, program.kind, program.stock, program.calls)
    both = [functools.partial(program.run, choice) for choice in ("auto", False)]
    begin = time.monotonic()
    auto, traced = run_in_children(both, timeout=timeout, env=report.CHILDREN)
    row.seconds = time.monotonic() - begin
    if auto.ok:
        row.steps, row.replays, row.reasons = auto.value.steps, auto.value.replays, auto.value.reasons
    errors = [_failed(name, run) for name, run in (("auto", auto), ("traced", traced)) if not run.ok]
    if errors:
        row.error = "; ".join(errors)
    else:
        row.difference = difference(traced.value, auto.value)
    return row


def _failed(name: str, run: Outcome) -> str:
    print(f"{run.error}\n{run.output}", file=sys.stderr, flush=True)
    return f"{name}: {run.short_error}"


def table_of(rows: list[Row]) -> str:
    """The table, and below it why a program is not covered or not correct."""
    shown = {"program": "name", "kind": "kind", "stock": "stock", "steps": "steps", "replayed": "replays"}
    text = report.table_of(rows, {**shown, "covered": "covered", "correct": "correct", "s": "seconds"})
    traced = [f"  {row.name}: {_reasons(row)}" for row in rows if not row.covered and row.error is None]
    wrong = [f"  {row.name}: {row.error or row.difference}" for row in rows if not row.correct]
    if traced:
        text += "\n\nnot covered, and why (times):\n" + "\n".join(traced)
    if wrong:
        text += "\n\nnot correct, and why:\n" + "\n".join(wrong)
    return text


def _reasons(row: Row) -> str:
    return "; ".join(f"{reason} ({times})" for reason, times in row.reasons.items()) or "no reason was given"


def add_targets(made: report.Report, rows: list[Row], at_least: int) -> None:
    """Adds the targets for the programs that ran."""
    made.target("programs that are covered", sum(row.covered for row in rows), "at least", at_least)
    made.target("programs that are correct", sum(row.correct for row in rows), "exactly", len(rows))
    stock = [row for row in rows if row.stock]
    made.target("stock models that are covered", sum(row.covered for row in stock), "exactly", len(stock))
    silent = [row for row in rows if not row.covered and row.error is None and not row.reasons]
    made.target("programs that are not covered without a reason", len(silent), "exactly", 0)


def main(command: list[str] | None = None) -> int:
    """The program."""
    parser = report.parser(str(__doc__).splitlines()[0])
    parser.add_argument("--programs", default="", metavar="NAMES", help="comma-separated names; all by default")
    parser.add_argument("--timeout", type=float, default=240, help="seconds per run")
    parser.add_argument("--at-least", type=int, help=f"how many must be covered; {WANTED} of all {len(PROGRAMS)}")
    options = parser.parse_args(command)
    try:
        programs = named(options.programs)
    except ValueError as error:
        parser.error(str(error))
    at_least = options.at_least if options.at_least is not None else WANTED * len(programs) // len(PROGRAMS)
    report.freeze_imports()
    made = report.Report("replay_coverage", settings={"programs": [program.name for program in programs]})
    rows = report.measured(
        made,
        options,
        programs,
        lambda program: measure(program, options.timeout),
        name=lambda row: f"{row.name} ({row.seconds:.0f} s)",
        state=lambda row: (
            f"{row.replays} of {row.steps} replayed, "
            f"{'correct' if row.correct else f'NOT correct: {row.error or row.difference}'}"
        ),
        verdict=lambda row: {"covered": row.covered, "correct": row.correct},
    )
    add_targets(made, rows, at_least)
    print(str(__doc__).split("\n\n", 1)[1])
    print(table_of(rows))
    covered, correct = sum(row.covered for row in rows), sum(row.correct for row in rows)
    print(f"\n{covered} of {len(rows)} are covered, {correct} are correct.")
    return made.finish(options)


if __name__ == "__main__":
    sys.exit(main())
