"""`rows`: many operators in forked children, of which one may end without the others being lost."""

from __future__ import annotations

import functools
import pickle
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import xla_adapters
from benchmarks.operators.cases import Case
from benchmarks.operators.measure import measure
from benchmarks.operators.row import Row, failed, row_of
from tests.children import run_in_child

# Of operators in a child: each starts the runtime anew, which takes a second.
GROUP = 32


def rows(cases: Mapping[str, Sequence[Case]], timeout: float) -> Iterator[Row]:
    """The row of each operator.

    Args:
        cases: of each operator.
        timeout: seconds for a child; the operator that it is at then fails.
    """
    left = list(cases)
    while left:
        group = {name: cases[name] for name in left[:GROUP]}
        done, error = _in_child(group, timeout)
        yield from done
        left = left[len(done) :]
        if error is not None:
            # The first that is not done is what the child was at.
            yield failed(left[0], error, len(cases[left[0]]))
            left = left[1:]


def _in_child(group: Mapping[str, Sequence[Case]], timeout: float) -> tuple[list[Row], str | None]:
    """The rows up to the end of the child, and why that came early, if it did."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "rows")
        path.touch()
        outcome = run_in_child(functools.partial(_measure_all, group, path), timeout=timeout)
        done = list(_read(path))
    if outcome.ok or len(done) == len(group):
        return done, None
    print(f"{outcome.error}\n{outcome.output}", file=sys.stderr, flush=True)
    return done, str(outcome.short_error)


def _read(path: Path) -> Iterator[Any]:
    with path.open("rb") as stream:
        while True:
            try:
                yield pickle.load(stream)
            except (EOFError, pickle.UnpicklingError):
                return


def _measure_all(group: Mapping[str, Sequence[Case]], path: Path) -> None:
    warnings.simplefilter("ignore")
    xla_adapters.initialize()
    with path.open("ab", buffering=0) as stream:
        for name, cases in group.items():
            row = row_of(name, [measure(name, case) for case in cases])
            stream.write(pickle.dumps(row))
