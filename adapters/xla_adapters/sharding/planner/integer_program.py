"""The integer program of a model on one mesh, solved by HiGHS through `scipy.optimize.milp`.

There is one choice per operator (its strategy) and per parameter (how it is stored), and a cost for each pair of
choices of a producer and a user. Instead of products of two choices, the program has flows from the states of the
producer to those of the user: a transport problem, whose relaxation is tight. Equal layers share their choices, so the
number of columns does not depend on the number of layers. The formulation follows Alpa (Zheng et al., OSDI 2022),
section 4.2.

For a model that cannot be captured the order of layers is not known, and a pair of layers that is split in the wrong
way communicates more than it saves. What works for any model is to split the batch over all devices, and to gather
split parameters: `formulate_by_parameters`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_matrix

from xla_adapters.errors import SolverError
from xla_adapters.sharding.mesh import DATA, MODEL, Mesh, Spec
from xla_adapters.sharding.plan_data import CollectiveCost
from xla_adapters.sharding.planner.costs import (
    GRADIENTS,
    Fabric,
    Parameter,
    State,
    data_charges,
    gather_counts,
    split_dim,
    stored_bytes,
    stored_specs,
    use_charges,
)
from xla_adapters.sharding.planner.graph import Captured, Operand, Operator
from xla_adapters.sharding.planner.layouts import Strategy, Want, reshard, seen_as
from xla_adapters.sharding.planner.memory import PRODUCTS, kept_shares
from xla_adapters.sharding.planner.strategies import strategies_of
from xla_adapters.utils.patching import without_lines

# Relative tolerance of the optimum.
_GAP = 1e-5
# The search is limited by nodes and not by time, so that plans are the same on every machine.
_NODES = 20_000


@dataclass(kw_only=True)
class IntegerProgram:
    """An integer linear program. Columns are choices (0 or 1) and flows between choices; each costs seconds and bytes.

    The lists are by column.

    Attributes:
        strategies: for each class of operators, its strategies with their columns.
        stores: for each class of parameters, its specs with their columns.
        parameters: by name of a class, the class with its uses.
        copies: by column, the class of operators of whose output it keeps a copy in another layout for products, and
            how many there are of the class.
        seconds: compute and communication.
        compute: compute alone.
        charges: collectives, and how often each runs.
        memory: bytes by kind.
        integral: whether it is a choice.
    """

    seconds: list[float] = field(default_factory=list)
    compute: list[float] = field(default_factory=list)
    charges: list[tuple[tuple[CollectiveCost, float], ...]] = field(default_factory=list)
    memory: list[Mapping[str, float]] = field(default_factory=list)
    integral: list[bool] = field(default_factory=list)
    strategies: dict[int, list[tuple[Strategy, int]]] = field(default_factory=dict)
    stores: dict[str, list[tuple[Spec, int]]] = field(default_factory=dict)
    parameters: dict[str, Parameter] = field(default_factory=dict)
    copies: dict[int, tuple[int, int]] = field(default_factory=dict)
    _rows: list[tuple[Sequence[int], Sequence[float], float, float]] = field(default_factory=list)

    def column(
        self,
        *,
        compute: float = 0.0,
        charges: Sequence[CollectiveCost] = (),
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


# The dimension that is split over the model axis, and whether the data axis splits nothing.
_Stored = tuple[State, bool]
_Left = TypeVar("_Left", State, _Stored)
_Right = TypeVar("_Right", tuple[State, bool], Want)
Filter = Callable[[Operator, list[Strategy]], list[Strategy]]


@dataclass(frozen=True, kw_only=True)
class _Use:
    """One use of a value by an operator.

    Attributes:
        consumer: the class of the operator.
        position: of the value among its operands.
        operand: the value as the operator sees it.
    """

    consumer: int
    position: int
    operand: Operand


@dataclass(kw_only=True)
class Formulation:
    """Writes the program of a captured model.

    Args:
        model: the captured model.
        parameters: by the name that represents a class.
        fabric: costs and mesh.
        filters: remove strategies; a filter that would remove all is ignored.
        held: operators whose output will be constrained; other outputs are used as they are split, or gathered.
        follow: only layouts that GSPMD (Xu et al., arXiv 2105.04663) propagates from the parameters by itself: a value
            is split over the model axis only if a parameter used with it is. Otherwise the batch and the sequence may
            be split, too.
    """

    model: Captured
    parameters: Mapping[str, Parameter]
    fabric: Fabric
    filters: Sequence[Filter]
    held: Collection[int]
    follow: bool
    program: IntegerProgram = field(default_factory=IntegerProgram)
    batched: set[int] = field(default_factory=set)
    broadcast: set[int] = field(default_factory=set)

    def write(self) -> IntegerProgram:
        """The program."""
        uses: dict[str, int] = {}
        others: set[str] = set()
        lookups: dict[str, tuple[float, ...]] = {}
        rows: dict[str, int] = {}
        self._find_batch()
        for operator in self.model.graph.operators:
            for operand in operator.operands:
                if operand.parameter is None:
                    continue
                # If the operator does not depend on the batch, gradients are summed before they reach the parameter.
                uses[operand.parameter] = uses.get(operand.parameter, 0) + (operator.index in self.batched)
                if operator.target not in PRODUCTS or len(operand.shape) < 2:
                    others.add(operand.parameter)
                elif operator.index in self.batched:
                    rows[operand.parameter] = max(rows.get(operand.parameter, 0), _rows(operator, len(operand.shape)))
                if operator.target == "embedding" and operator.index in self.batched:
                    lookups[operand.parameter] = (*lookups.get(operand.parameter, ()), operator.size)
        for name in sorted(self.parameters):
            found = replace(
                self.parameters[name],
                uses=uses.get(name, 1),
                lookups=lookups.get(name, ()),
                products=name in uses and name not in others,
                rows=rows.get(name, 0),
            )
            self.program.parameters[name] = found
            self._store(found)
        times: dict[int, int] = {}
        for operator in self.model.graph.operators:
            key = self.model.folded.operators.of(operator.index)
            times[key] = times.get(key, 0) + self.model.folded.weights[operator.index]
        topology = self.fabric.topology
        kept = kept_shares(self.model.graph, recomputes=topology.recomputes, rounds=topology.rounds_products)
        for operator in self.model.graph.operators:
            if operator.index in times:
                self._choose(operator, times[operator.index], kept.get(operator.index, 0.0))
        for operator in self.model.graph.operators:
            if operator.index in times:
                for position, operand in enumerate(operator.operands):
                    if operand.parameter is not None:
                        self._use_of_parameter(operator, position, operand, times[operator.index])
        self._uses_of_values()
        return self.program

    @property
    def _mesh(self) -> Mesh:
        return self.fabric.mesh

    def _store(self, parameter: Parameter) -> None:
        program = self.program
        columns = []
        fabric = self.fabric
        for spec in stored_specs(parameter, self._mesh):
            for gathers in gather_counts(parameter, spec, fabric):
                charges = data_charges(parameter, spec, fabric, gathers) * parameter.count
                column = program.column(charges=charges, integral=True)
                program.memory[column] = stored_bytes(parameter, spec, fabric, gathers)
                columns.append((spec, column))
        program.choose_one([column for _, column in columns])
        self.program.stores[parameter.name] = columns

    def _find_batch(self) -> None:
        """Finds the operators that depend on the batch, and others with a gradient that are used by these."""
        learned: set[int] = set()
        for operator in self.model.graph.operators:
            sources = {operand.source for operand in operator.operands if operand.source is not None}
            names = {operand.parameter for operand in operator.operands if operand.parameter is not None}
            if sources & learned or any(self._class_of(name).trainable for name in names):
                learned.add(operator.index)
            if operator.batch is not None or sources & self.batched:
                self.batched.add(operator.index)
                self.broadcast |= sources & learned - self.batched

    def _class_of(self, parameter: str) -> Parameter:
        return self.parameters[self.model.folded.parameters.of(parameter)]

    def _sums(self, operator: Operator, strategy: Strategy) -> tuple[CollectiveCost, ...]:
        """Reductions of gradients of values that do not depend on the batch (a relative position bias, say)."""
        fabric, size = self.fabric, 0.0
        if not fabric.topology.merges_sums:
            for operand, want in zip(operator.operands, strategy.wants, strict=True):
                if operator.index in self.batched and operand.source in self.broadcast:
                    # Not the operand's size, which may be expanded.
                    whole = self.model.graph.operators[operand.source].size
                    size += whole / (1 if want.state is None else fabric.model)
        elif operator.index in self.broadcast:
            size = self.fabric.local(operator, strategy.output)
        return fabric.all_reduce(DATA, size, GRADIENTS) if size else ()

    def _choose(self, operator: Operator, times: int, kept: float) -> None:
        found, known = strategies_of(operator, self.fabric)
        if not known:
            self.model.graph.unknown.add(".".join(part for part in (operator.namespace, operator.target) if part))
        for keep in self.filters:
            found = keep(operator, found) or found
        columns = []
        for strategy in found:
            size = strategy.keeps + kept * self.fabric.local(operator, strategy.output)
            unary = () if self.fabric.topology.recomputes else self.model.graph.kept.get(operator.index, ())
            for dims, whole, batch in unary:
                split = strategy.output is not None and dims[strategy.output] is not None
                parts = self.fabric.data if batch is not None else 1
                size += whole / parts / (self.fabric.model if split else 1)
            # Recomputed layers run their forward twice (a third more), and only one at a time keeps its activations.
            again = operator.index in self.model.folded.recomputed
            column = self.program.column(
                compute=strategy.seconds * (4 / 3 if again else 1),
                charges=(*strategy.charges, *self._sums(operator, strategy)),
                memory={"activations": size / times if again else size},
                integral=True,
                times=times,
            )
            columns.append((strategy, column))
        self.program.choose_one([column for _, column in columns])
        self.program.strategies[operator.index] = columns

    def _use_of_parameter(self, operator: Operator, position: int, operand: Operand, times: int) -> None:
        """Adds the flows from the stored layouts of a parameter to those in which an operator uses it."""
        if self.fabric.model == 1 or operand.parameter is None:
            return
        parameter = self._class_of(operand.parameter)
        left: dict[_Stored, list[int]] = {}
        for spec, column in self.program.stores[parameter.name]:
            key = (split_dim(spec, MODEL), split_dim(spec, DATA) is None)
            left.setdefault(key, []).append(column)
        right: dict[tuple[State, bool], list[int]] = {}
        for strategy, column in self.program.strategies[operator.index]:
            want = strategy.wants[position]
            used = None if want.state is None else operand.origin(want.state)
            right.setdefault((used, want.partial), []).append(column)
        flows = {
            (stored, use): self.program.column(
                charges=use_charges(parameter, stored[0], use[0], use[1], stored[1], self.fabric),
                times=times,
            )
            for stored in left
            for use in right
            # GSPMD does not move the split of a parameter to another dimension: it keeps it, or gathers.
            if stored[0] is None or use[0] in (None, stored[0])
        }
        self._balance(flows, left, right)

    def _balance(
        self,
        flows: Mapping[tuple[_Left, _Right], int],
        left: Mapping[_Left, list[int]],
        right: Mapping[_Right, list[int]],
    ) -> None:
        """Constrains flows: the sum out of each left choice, and into each right one, equals that choice (0 or 1)."""
        for begin, columns in left.items():
            terms = {column: 1.0 for (start, _), column in flows.items() if start == begin}
            self.program.row(terms | dict.fromkeys(columns, -1.0), 0.0, 0.0)
        for want, columns in right.items():
            terms = {column: 1.0 for (_, end), column in flows.items() if end == want}
            self.program.row(terms | dict.fromkeys(columns, -1.0), 0.0, 0.0)

    def _uses_of_values(self) -> None:
        """Adds the flows of all values to their users; those of equal layers are added once and counted."""
        uses: dict[int, list[_Use]] = {}
        counts: dict[int, int] = {}
        for operator in self.model.graph.operators:
            for position, operand in enumerate(operator.operands):
                if operand.source is not None:
                    consumer = self.model.folded.operators.of(operator.index)
                    uses.setdefault(operand.source, []).append(
                        _Use(consumer=consumer, position=position, operand=operand)
                    )
                    weight = self.model.folded.weights[operator.index]
                    counts[operand.source] = max(counts.get(operand.source, 0), weight)
        merged: dict[tuple[object, ...], tuple[int, list[_Use], int]] = {}
        for source, consumers in uses.items():
            form = tuple((use.consumer, use.position, use.operand.dims) for use in consumers)
            key = (self.model.folded.operators.of(source), form)
            count = merged[key][2] if key in merged else 0
            merged[key] = (source, consumers, count + counts[source])
        for (first, *_), (_, consumers, count) in merged.items():
            self._fan_out(int(str(first)), consumers, count)

    def _fan_out(self, index: int, consumers: Sequence[_Use], times: int) -> None:
        """Adds the flows of one value to its users; a layout that several users want is made once."""
        if self.fabric.model == 1:
            return
        source = self.model.graph.operators[index]
        left: dict[State, list[int]] = {}
        for strategy, column in self.program.strategies[index]:
            left.setdefault(strategy.output, []).append(column)
        shared: dict[tuple[object, ...], list[tuple[int, _Use, Want]]] = {}
        for use in consumers:
            right: dict[Want, list[int]] = {}
            cuts: set[Want] = set()
            for strategy, column in self.program.strategies[use.consumer]:
                want = strategy.wants[use.position]
                right.setdefault(want, []).append(column)
                if self._may_cut(use.consumer, strategy):
                    cuts.add(want)
            flows: dict[tuple[State, Want], int] = {}
            for state in left:
                for want in right:
                    if self.follow and state is None and want.state is not None and want not in cuts:
                        continue
                    if self.follow and self._stays(use, state, right) and want.state is None:
                        continue
                    if index not in self.held and self._turns(use, state, want):
                        continue
                    flows[state, want] = column = self.program.column()
                    origin = None if want.state is None else use.operand.origin(want.state)
                    view = (use.operand.dims, want.state) if want.state is not None and origin is None else ()
                    key = (state, origin, want.partial, view)
                    shared.setdefault(key, []).append((column, use, want))
            self._balance(flows, left, right)
        for (start, *_), members in shared.items():
            self._price(source, start if isinstance(start, int) else None, members, times)

    def _stays(self, use: _Use, state: State, wants: Mapping[Want, Sequence[int]]) -> bool:
        """Whether GSPMD keeps the split of a value that a `split` operator takes apart along the same dimension."""
        if state is None or self.model.graph.operators[use.consumer].target != "split":
            return False
        return any(want.state is not None and use.operand.origin(want.state) == state for want in wants)

    def _turns(self, use: _Use, state: State, want: Want) -> bool:
        """Whether a value would move its split to another dimension although nothing makes GSPMD do so."""
        view = seen_as(self.fabric, use.operand, state)
        parameters = any(item.parameter is not None for item in self.model.graph.operators[use.consumer].operands)
        return not parameters and view is not None and want.state not in (None, view)

    def _price(self, source: Operator, state: State, members: Sequence[tuple[int, _Use, Want]], times: int) -> None:
        changes = [reshard(self.fabric, source, use.operand, state, want) for _, use, want in members]
        flows = [flow for flow, _, _ in members]
        forward = max(changes, key=lambda item: _seconds(item.forward))
        kept = forward.kept / times if members[0][1].consumer in self.model.folded.recomputed else forward.kept
        copied = self._charge(flows, forward.forward, kept, times)
        products = any(self.model.graph.operators[use.consumer].target in PRODUCTS for _, use, _ in members)
        if copied is not None and kept and products:
            self.program.copies[copied] = (self.model.folded.operators.of(source.index), times)
        if any(change.sums for change in changes) and not self.fabric.topology.merges_sums:
            for flow, change in zip(flows, changes, strict=True):
                self._charge([flow], change.backward, 0.0, times)
        else:
            self._charge(flows, max((item.backward for item in changes), key=_seconds), 0.0, times)

    def _charge(self, flows: Sequence[int], charges: tuple[CollectiveCost, ...], kept: float, times: int) -> int | None:
        """Adds collectives that run once if any of these flows is used; their column, if there are any."""
        if not charges:
            return None
        program = self.program
        column = program.column(charges=charges, memory={"activations": kept}, times=times)
        for flow in flows:
            program.row({column: 1.0, flow: -1.0}, 0.0, float("inf"))
        return column

    def _may_cut(self, consumer: int, strategy: Strategy) -> bool:
        """Whether a split parameter makes GSPMD split the other operands of an operator."""
        operands = self.model.graph.operators[consumer].operands
        return any(
            operand.parameter is not None and want.state is not None
            for operand, want in zip(operands, strategy.wants, strict=True)
        )


def _rows(operator: Operator, rank: int) -> int:
    """Rows of the product of a batch and a weight of this rank; one of three dimensions is a matrix per expert."""
    if operator.target.startswith("conv"):
        return math.prod(operator.shape) // max(1, operator.shape[1])
    return operator.shape[-2] if rank == 3 else math.prod(operator.shape[:-1])


def _seconds(charges: tuple[CollectiveCost, ...]) -> float:
    return sum(charge.seconds for charge in charges)


def formulate_by_parameters(
    parameters: Mapping[str, Parameter], fabric: Fabric, *, rows: int
) -> tuple[IntegerProgram, bool]:
    """Writes the program, with choices for parameters only.

    Args:
        parameters: by name.
        fabric: the cost of collectives.
        rows: size of the batch.

    Returns:
        The program, and whether the batch is split over the model axis, too.
    """
    program = IntegerProgram()
    spread = fabric.model > 1 and rows % (fabric.data * fabric.model) == 0
    parts = fabric.data * (fabric.model if spread else 1)
    for name in sorted(parameters):
        parameter = parameters[name]
        # Per row, each element of a weight costs 2 operations in the forward and 4 in the backward.
        work = 6.0 * rows * parameter.size / parameter.itemsize / parts / fabric.topology.flops
        columns = []
        options = [
            (spec, gathers)
            for spec in stored_specs(parameter, fabric.mesh)
            for gathers in gather_counts(parameter, spec, fabric)
        ]
        for spec, gathers in options:
            stored, whole = split_dim(spec, MODEL), split_dim(spec, DATA) is None
            charges = (
                *data_charges(parameter, spec, fabric, gathers),
                *use_charges(parameter, stored, None, spread, whole, fabric),
            )
            column = program.column(compute=work, charges=charges, integral=True, times=parameter.count)
            program.memory[column] = stored_bytes(parameter, spec, fabric, gathers)
            columns.append((spec, column))
        program.choose_one([column for _, column in columns])
        program.stores[name] = columns
    return program, spread
