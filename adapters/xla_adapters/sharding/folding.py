"""Folds repeated layers into one row of a table: `layers.0.weight`, `layers.1.weight` -> `layers.{0-1}.weight`."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

from xla_adapters.sharding.plan_data import ParameterPlan


@dataclass(frozen=True, kw_only=True)
class Fold:
    """Equal parameters whose names differ only in the number of a layer.

    Attributes:
        name: with ranges of numbers in braces.
        parameters: in the plan's order.
    """

    name: str
    parameters: tuple[ParameterPlan, ...]

    @property
    def first(self) -> ParameterPlan:
        """The first parameter; all have its shape, dtype and spec."""
        return self.parameters[0]


def fold(parameters: Iterable[ParameterPlan]) -> tuple[Fold, ...]:
    """Folds parameters with equal shape, dtype, spec and `decided_by`, in the order of their first one.

    A tied weight is not folded.
    """
    rows: list[tuple[tuple[str, ...], Hashable, tuple[ParameterPlan, ...]]] = [
        (tuple(entry.name.split(".")), _alike(entry), (entry,)) for entry in parameters
    ]
    positions = max((len(parts) for parts, _, _ in rows), default=0)
    # From the right: first the experts of a layer, then layers whose experts fold in the same way.
    for position in reversed(range(positions)):
        rows = _folded_at(rows, position)
    return tuple(Fold(name=".".join(parts), parameters=members) for parts, _, members in rows)


def _alike(entry: ParameterPlan) -> Hashable:
    return (entry.shape, entry.dtype, entry.spec, entry.decided_by, entry.name if entry.tied else None)


def _folded_at(
    rows: Sequence[tuple[tuple[str, ...], Hashable, tuple[ParameterPlan, ...]]], position: int
) -> list[tuple[tuple[str, ...], Hashable, tuple[ParameterPlan, ...]]]:
    groups: dict[Hashable, list[tuple[tuple[str, ...], Hashable, tuple[ParameterPlan, ...]]]] = {}
    for row in rows:
        parts, alike, _ = row
        key: Hashable = parts
        if position < len(parts) and parts[position].isdecimal():
            key = (*parts[:position], None, *parts[position + 1 :])
        groups.setdefault((key, alike), []).append(row)
    folded = []
    for group in groups.values():
        parts, alike, members = group[0]
        if len(group) > 1:
            numbers = sorted(int(row[0][position]) for row in group)
            parts = (*parts[:position], "{" + ranges(numbers) + "}", *parts[position + 1 :])
            members = tuple(member for row in group for member in row[2])
        folded.append((parts, alike, members))
    return folded


def ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers as text: `0-3,5,8-9`; evenly spaced ones as `0,4,..,252`."""
    if len(numbers) > 3 and numbers[1] - numbers[0] > 1:
        step = numbers[1] - numbers[0]
        if all(after - before == step for before, after in itertools.pairwise(numbers)):
            return f"{numbers[0]},{numbers[1]},..,{numbers[-1]}"
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
