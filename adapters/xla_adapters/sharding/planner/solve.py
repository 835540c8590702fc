"""`Program`: an integer linear program, solved by HiGHS through `scipy.optimize.milp`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_matrix

from xla_adapters.errors import SolverError
from xla_adapters.sharding.planner.costs import Charge
from xla_adapters.utils.patching import without_lines

# Relative tolerance of the optimum.
_GAP = 1e-5
# The search is limited by nodes and not by time, so that plans are the same on every machine.
_NODES = 20_000


@dataclass(kw_only=True)
class Program:
    """An integer linear program. Columns are choices (0 or 1) and flows between choices; each costs seconds and bytes.

    The lists are by column.

    Attributes:
        seconds: compute and communication.
        compute: compute alone.
        charges: collectives, and how often each runs.
        memory: bytes by kind.
        integral: whether it is a choice.
    """

    seconds: list[float] = field(default_factory=list)
    compute: list[float] = field(default_factory=list)
    charges: list[tuple[tuple[Charge, float], ...]] = field(default_factory=list)
    memory: list[Mapping[str, float]] = field(default_factory=list)
    integral: list[bool] = field(default_factory=list)
    _rows: list[tuple[Sequence[int], Sequence[float], float, float]] = field(default_factory=list)

    def column(
        self,
        *,
        compute: float = 0.0,
        charges: Sequence[Charge] = (),
        memory: Mapping[str, float] | None = None,
        integral: bool = False,
        times: float = 1.0,
    ) -> int:
        """Adds a column, with all costs multiplied by `times`; returns its index."""
        self.seconds.append(times * (compute + sum(charge.seconds for charge in charges)))
        self.compute.append(times * compute)
        self.charges.append(tuple((charge, times) for charge in charges))
        self.memory.append({kind: times * size for kind, size in (memory or {}).items()})
        self.integral.append(integral)
        return len(self.seconds) - 1

    def row(self, terms: Mapping[int, float], low: float, high: float) -> None:
        """Adds the constraint low <= sum of columns weighted by `terms` <= high."""
        self._rows.append((list(terms), list(terms.values()), low, high))

    def choose_one(self, columns: Sequence[int]) -> None:
        """Adds the constraint that exactly one of these columns is chosen."""
        self.row(dict.fromkeys(columns, 1.0), 1.0, 1.0)

    def solve(self, budget: float | None) -> tuple[float, ...] | None:
        """The values of all columns in the fastest solution; None if nothing fits the memory budget (bytes).

        Raises:
            SolverError: the solver failed.
        """
        return self._milp(np.asarray(self.seconds), budget)

    def smallest(self) -> tuple[float, ...]:
        """The values of all columns in the solution that takes the fewest bytes."""
        values = self._milp(np.asarray(self._bytes()), None)
        assert values is not None  # Without a budget there is a solution.
        return values

    def size(self, values: Sequence[float]) -> float:
        """The bytes that a solution takes, all together."""
        return float(np.dot(values, self._bytes()))

    def _bytes(self) -> list[float]:
        return [sum(kinds.values()) for kinds in self.memory]

    def _milp(self, objective: np.ndarray, budget: float | None) -> tuple[float, ...] | None:
        count = len(self.seconds)
        rows = list(self._rows)
        if budget is not None:
            sizes = {column: size / budget for column, size in enumerate(self._bytes()) if size}
            rows.append((list(sizes), list(sizes.values()), -np.inf, 1.0))
        pointers = np.cumsum([0, *(len(columns) for columns, _, _, _ in rows)])
        matrix = csr_matrix(
            (
                np.concatenate([np.asarray(values, dtype=float) for _, values, _, _ in rows]),
                np.concatenate([np.asarray(columns, dtype=np.int32) for columns, _, _, _ in rows]),
                pointers,
            ),
            shape=(len(rows), count),
        )
        # Scaled to about 1 for the solver, plus a small preference for earlier columns, so that ties are reproducible.
        scale = float(np.sum(objective[np.asarray(self.integral)])) / max(1, sum(self.integral)) or 1.0
        ties = np.where(self.integral, np.arange(count) / count * 1e-7, 0.0)
        with without_lines("HighsMipSolverData::"):
            result = milp(
                objective / scale + ties,
                constraints=LinearConstraint(matrix, [row[2] for row in rows], [row[3] for row in rows]),
                integrality=np.asarray(self.integral, dtype=int),
                bounds=Bounds(0, 1),
                options={"mip_rel_gap": _GAP, "node_limit": _NODES},
            )
        if result.x is None:
            if result.status == 2:
                return None
            raise SolverError(f"the planner's integer program of {count} columns was not solved: {result.message}")
        return tuple(float(value) for value in result.x)
