"""`Row`: an operator, and what its samples showed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.operators.measure import LIMIT, ORDER, Found, How
from benchmarks.operators.sources import without_values


@dataclass
class Row:
    """A line of the table. The worst sample decides.

    Attributes:
        operator: its name.
        samples: how many it was tried with.
        sources: where they are from.
        forward, backward: how the operator runs; None for an operator of the backward only, and without a backward.
        difference: the largest to the CPU, of values above 1 relative to them; None if there is none to tell.
        without_values: why only shapes and dtypes are compared, if so.
        kernels: torch_xla's that ran in place of the operator's own.
        notes: why samples are not in the graph, or differ.
    """

    operator: str
    samples: int = 0
    sources: list[str] = field(default_factory=list)
    forward: How | None = None
    backward: How | None = None
    difference: float | None = None
    without_values: str | None = None
    kernels: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def tried(self) -> bool:
        """Whether there is a sample."""
        return self.samples > 0

    @property
    def how(self) -> How | None:
        """How it runs, forward and backward; None if it was not tried."""
        return _worst([self.forward, self.backward])

    @property
    def in_graph(self) -> bool:
        """Whether every sample is part of the step's graph, forward and backward."""
        return self.how in ("in the graph", "by decomposition")

    @property
    def differs(self) -> bool:
        """Whether a sample's values (or shapes) are not those of the CPU."""
        return self.difference is not None and not self.difference <= LIMIT


def _worst(hows: Sequence[How | None]) -> How | None:
    return max((how for how in hows if how is not None), key=ORDER.index, default=None)


def row_of(operator: str, found: Sequence[Found]) -> Row:
    """The row of an operator that was tried with these samples, none if there are none."""
    row = Row(operator, len(found), without_values=without_values(operator))
    row.sources = list(dict.fromkeys(one.source for one in found))
    row.forward = _worst([one.forward for one in found])
    row.backward = _worst([one.backward for one in found])
    # Not a number is reported as infinite.
    row.difference = max((one.difference for one in found if one.difference is not None), default=None)
    row.kernels = sorted({name for one in found for name in one.kernels})
    reasons = [one.why for one in found if one.why is not None]
    row.notes = [_times(reason, reasons.count(reason), len(found)) for reason in dict.fromkeys(reasons)]
    if not found:
        row.notes = ["not tried: neither torch's list of sample inputs nor a direct call reaches it"]
    return row


def failed(operator: str, why: str, samples: int) -> Row:
    """The row of an operator that ended the process it was tried in."""
    return Row(operator, samples, forward="fails", notes=[why])


def _times(reason: str, times: int, samples: int) -> str:
    return f"{reason} ({times} of {samples} samples)"
