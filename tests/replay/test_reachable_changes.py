"""Whatever a step can reach is changed, one thing at a time: the replayed run has the numbers of the traced one.

The programs and the search are in `tests/replay/reachable`. `REACHABLE_SEED=7` makes another choice of changes;
the seed stands in each failure, with the program, the place, the change and the first step that differs.
`REACHABLE_ALL=1` has the slow tests make all of them, as `make test-long` does: after a change to what guards replays.
"""

from __future__ import annotations

import functools
import os
import random
from collections.abc import Sequence

import pytest

from tests.device import ON_TORCH_TPU
from tests.isolation import isolated, run_in_child
from tests.replay.reachable import checks
from tests.replay.reachable.pinned import PINNED, Pinned
from tests.replay.reachable.program import FILES, Program, corpus
from tests.replay.reachable.running import AFTER, BEFORE

SEED = int(os.environ.get("REACHABLE_SEED", "0"))
# In a default run: programs of each file, and changes of each program.
_PROGRAMS, _SAMPLE = 1 if ON_TORCH_TPU else 2, 2
# Of places that nearly every program has, where all changes are made: all of one program's, and of the others so many.
_COMMON = 1
_ALL = os.environ.get("REACHABLE_ALL") == "1"
# Of the other places of a program; a run of a training with a framework takes seconds.
_OWN = None if _ALL else 4
_OF_TRAINERS = 5 if _ALL else 1
_ALL_COMMON = ("mlp_adamw",)
_TRAINERS = ("hf", "lightning")
# A training with a framework takes longer: so many tests share these.
_PARTS = {"hf": 3, "lightning": 4, "plain": 2}


def _of(file: str) -> list[Program]:
    return [program for program in corpus().values() if program.module.endswith(f"programs_{file}")]


def _check(programs: Sequence[Program], *, own: int | None, common: int) -> None:
    """Makes changes of each program in a child of its own, and demands that none went unnoticed."""
    reports = []
    for program in programs:
        common_ones = None if _ALL and program.name in _ALL_COMMON else common
        search = functools.partial(checks.check, program, seed=SEED, own=own, common=common_ones)
        reports.append(run_in_child(search, timeout=500))
    failures = [failure for report in reports for failure in report.failures]
    compared, skipped = sum(report.compared for report in reports), sum(report.skipped for report in reports)
    print(f"REACHABLE_SEED={SEED}: {compared} changes compared, {skipped} not, as the traced step fails with them")
    assert not failures, f"{len(failures)} of {compared} changes went unnoticed:\n" + "\n".join(failures)
    assert compared > skipped


@pytest.mark.parametrize("file", FILES)
def test_a_sample_of_changes(file: str) -> None:
    programs = random.Random(f"{SEED} {file}").sample(_of(file), 1 if file in _PARTS else _PROGRAMS)
    _check(programs, own=_SAMPLE, common=1)


@pytest.mark.parametrize(
    ("file", "part"),
    [
        pytest.param(file, part, marks=pytest.mark.long if part or file in _TRAINERS else pytest.mark.slow)
        for file in FILES
        for part in range(_PARTS.get(file, 1))
    ],
    ids=str,
)
def test_many_changes(file: str, part: int) -> None:
    own = _OWN if file not in _TRAINERS else _OF_TRAINERS
    _check(_of(file)[part :: _PARTS.get(file, 1)], own=own, common=_COMMON)


@pytest.mark.parametrize("pinned", PINNED, ids=str)
@isolated
def test_a_change_of_each_kind(pinned: Pinned) -> None:
    """Changes that replays have overlooked."""
    difference, was_compared = checks.compare(corpus()[pinned.program], pinned.pair)
    assert was_compared, f"{pinned}: the traced run fails with it"
    assert difference is None, f"{pinned.program}: {pinned.path}: {pinned.change} (pinned, no seed): {difference}"


def _replayed(programs: Sequence[Program]) -> dict[str, tuple[int, list[str]]]:
    found = {}
    for program in programs:
        outcome = checks.replayed(program)
        found[program.name] = outcome.replays, list(outcome.reasons)
    return found


def test_plain_programs_are_replayed() -> None:
    """Otherwise nothing here could fail. What is expected to be traced is not among them."""
    found: dict[str, tuple[int, list[str]]] = {}
    for file in FILES:
        if programs := [program for program in _of(file) if program.plain]:
            found |= run_in_child(functools.partial(_replayed, programs))
    traced = {name: reasons for name, (replays, reasons) in found.items() if replays < (BEFORE + AFTER) / 2}
    print(f"{len(found) - len(traced)} of {len(found)} are replayed")
    assert len(traced) <= len(found) / 2, f"{len(traced)} of {len(found)} are traced: {traced}"


def _differences(programs: Sequence[Program]) -> list[str]:
    found = ((program.name, checks.unchanged(program)) for program in programs)
    return [f"{name}: {difference}" for name, difference in found if difference is not None]


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES)
def test_all_programs_unchanged(file: str) -> None:
    """Counters and annealing of their own alone must not be left out."""
    assert run_in_child(functools.partial(_differences, _of(file)), timeout=500) == []
