"""Changes one thing that a step may reach, in a traced and in a replayed run of a program, and compares both."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tests.replay.reachable.program import Program
from tests.replay.reachable.running import Outcome, run
from tests.replay.reachable.walker import Leaf


@dataclass(frozen=True)
class Pair:
    """A change: of what, and how; and whether nearly every program has such a place."""

    path: str
    change: str
    common: bool = False


@dataclass
class Report:
    """What came of the changes of one program.

    Attributes:
        program: its name.
        failures: readable, one for each change that a replay did not notice.
        compared: changes that were made in both runs.
        skipped: changes that the traced run did not survive.
        reached: places that were found.
    """

    program: str
    failures: list[str]
    compared: int = 0
    skipped: int = 0
    reached: int = 0


class NoSuchChange(LookupError):
    """The program reaches no such place, or it cannot be changed so."""


def changes_of(program: Program) -> list[Pair]:
    """All changes of a program, in a fixed order."""
    found: list[Pair] = []

    def note(leaves: list[Leaf]) -> None:
        found.extend(Pair(leaf.path, change, leaf.common) for leaf in leaves for change in leaf.changes)

    outcome = run(program, False, note)
    assert outcome.error is None, f"{program.name} fails by itself: {outcome.error}"
    return found


def compare(program: Program, pair: Pair) -> tuple[str | None, bool]:
    """How the replayed run differs from the traced one when something changes; and whether they were compared."""
    traced = run(program, False, _make(pair))
    if traced.error is not None:
        return None, False
    return traced.difference(run(program, "auto", _make(pair))), True


def _make(pair: Pair) -> Callable[[list[Leaf]], Any]:
    def intervene(leaves: list[Leaf]) -> Any:
        for leaf in leaves:
            if leaf.path == pair.path and pair.change in leaf.changes:
                return leaf.changes[pair.change]()
        raise NoSuchChange(f"{pair.path} has no change {pair.change!r}")

    return intervene


def check(program: Program, *, seed: int, own: int | None = None, common: int | None = None) -> Report:
    """Makes changes one after the other, each in runs of its own.

    Args:
        program: which.
        seed: of the choice; the same one makes the same choice.
        own: how many changes of the program's own places; all if not given.
        common: how many changes of places that nearly every program has.
    """
    before = run(program, False)
    pairs = changes_of(program)
    report = Report(program.name, [], reached=len({pair.path for pair in pairs}))
    generator = random.Random(f"{seed} {program.name}")
    chosen = _spread([pair for pair in pairs if not pair.common], generator, own)
    chosen += _spread([pair for pair in pairs if pair.common], generator, common)
    for pair in chosen:
        # Also for a crash or a hang of the child.
        print(f"{program.name}: {pair.path}: {pair.change}", flush=True)
        difference, was_compared = compare(program, pair)
        report.compared += was_compared
        report.skipped += not was_compared
        if difference is not None:
            report.failures.append(f"{program.name}: {pair.path}: {pair.change} (REACHABLE_SEED={seed}): {difference}")
    leak = before.difference(run(program, False))
    assert leak is None, f"{program.name}: a change outlived its run, so the later ones say nothing: {leak}"
    return report


def _spread(pairs: Sequence[Pair], generator: random.Random, sample: int | None) -> list[Pair]:
    """So many changes, each of another place: a parameter has more changes than a flag, and no more to tell."""
    if sample is None:
        return list(pairs)
    by_path: dict[str, list[Pair]] = {}
    for pair in pairs:
        by_path.setdefault(pair.path, []).append(pair)
    paths = sorted(by_path)
    return [generator.choice(by_path[path]) for path in generator.sample(paths, min(sample, len(paths)))]


def unchanged(program: Program) -> str | None:
    """How the replayed run differs from the traced one while nothing changes."""
    return run(program, False).difference(run(program, "auto"))


def replayed(program: Program) -> Outcome:
    """A run while nothing changes, with its replays counted."""
    outcome = run(program, "auto", counted=True)
    assert outcome.error is None, f"{program.name} fails by itself: {outcome.error}"
    return outcome
