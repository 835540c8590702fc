"""`Solution`: reads a plan and its cost from the solved program.

Filters reduce the strategies of operators to those that GSPMD (`propagated_only`), or a given plan (`forced`), allows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from xla_adapters.sharding.mesh import DATA, MODEL, DimSpec, Mesh, Spec, used_axes, without
from xla_adapters.sharding.plan import ShardingPlan
from xla_adapters.sharding.plan_data import ActivationPlan, PlanCost
from xla_adapters.sharding.planner.capture import Skeleton
from xla_adapters.sharding.planner.costs import Fabric, State, split_dim, total
from xla_adapters.sharding.planner.graph import Captured, Graph, Operand, Operator
from xla_adapters.sharding.planner.integer_program import Filter, IntegerProgram
from xla_adapters.sharding.planner.layouts import Strategy, Want, seen_as
from xla_adapters.sharding.planner.memory import PeakModel, Weight


def cost_of(
    program: IntegerProgram,
    values: Sequence[float],
    constant: Mapping[str, float],
    peak: Mapping[str, float] | None = None,
) -> PlanCost:
    """The cost of a solution.

    Args:
        program: the program.
        values: of its columns.
        constant: bytes by kind that do not depend on choices.
        peak: bytes by kind at the peak, in place of the program's sums.
    """
    memory = dict(constant)
    charges = []
    compute = 0.0
    for column, value in enumerate(values):
        if value < 1e-6:
            continue
        value = round(value, 6)
        compute += value * program.compute[column]
        charges += [(charge, value * count) for charge, count in program.charges[column]]
        for kind, size in program.memory[column].items():
            memory[kind] = memory.get(kind, 0.0) + value * size
    memory.update(peak or {})
    return PlanCost(
        memory={kind: memory[kind] for kind in sorted(memory)}, collectives=total(charges), compute_seconds=compute
    )


@dataclass(frozen=True, kw_only=True)
class Solution:
    """The solution for a captured model on one mesh, as specs, batch axes and constraints.

    Attributes:
        model: the captured model.
        fabric: costs and mesh.
        program: the program.
        values: of its columns.
    """

    model: Captured
    fabric: Fabric
    program: IntegerProgram
    values: Sequence[float]

    @property
    def _mesh(self) -> Mesh:
        return self.fabric.mesh

    def specs(self) -> dict[str, Spec]:
        """The spec of each class of parameters."""
        return {
            name: next(spec for spec, column in stores if self.values[column] > 0.5)
            for name, stores in self.program.stores.items()
        }

    def used(self) -> dict[str, Spec]:
        """The used specs of parameters that are split over the model axis, but that all operators use whole."""
        wants: dict[str, set[State]] = {}
        for operator in self.model.graph.operators:
            for operand, want in zip(operator.operands, self.strategy(operator.index).wants, strict=True):
                if operand.parameter is not None:
                    wants.setdefault(self.model.folded.parameters.of(operand.parameter), set()).add(want.state)
        return {
            name: whole(spec)
            for name, spec in self.specs().items()
            if MODEL in used_axes(spec) and wants.get(name) == {None}
        }

    def strategy(self, index: int) -> Strategy:
        """The chosen strategy of an operator."""
        columns = self.program.strategies[self.model.folded.operators.of(index)]
        return next(strategy for strategy, column in columns if self.values[column] > 0.5)

    def peak(self) -> dict[str, float] | None:
        """Bytes by kind that live at the peak; None if the compiler keeps everything, so that the sums are right."""
        if not self.fabric.topology.recomputes:
            return None
        weights = {
            name: Weight(
                parameter=self.program.parameters[name],
                spec=spec,
                kept="gathered" in self.program.memory[column],
            )
            for name, stores in self.program.stores.items()
            for spec, column in stores
            if self.values[column] > 0.5
        }
        copies: dict[int, float] = {}
        for column, (source, times) in self.program.copies.items():
            size = self.values[column] * self.program.memory[column]["activations"] / times
            copies[source] = copies.get(source, 0.0) + size
        return PeakModel(
            model=self.model,
            fabric=self.fabric,
            strategies={index: self.strategy(index) for index in self.program.strategies},
            weights=weights,
            copies=copies,
        ).memory()

    def batch(self) -> tuple[str, ...]:
        """The axes that the batch is split over: those of the outputs of the first operators."""
        votes = {True: 0.0, False: 0.0}
        for index in entries(self.model.graph):
            operator, strategy = self.model.graph.operators[index], self.strategy(index)
            # A scattered output means that the operator takes the whole batch.
            votes[strategy.output == operator.batch and not strategy.scatters] += operator.size
        axes = (DATA, MODEL) if votes[True] > votes[False] else (DATA,)
        return tuple(axis for axis in axes if axis in self._mesh.axis_names)

    def activations(self) -> tuple[ActivationPlan, ...]:
        """Constraints on outputs and inputs of modules, so that GSPMD uses the planned layouts.

        Outputs are constrained for each repeated layer and, if the model axis is used, for each module with parameters.
        Otherwise GSPMD propagates the layout of an embedding or a bias to later values, and gathers them at each use.
        Inputs of such modules are constrained if they need another layout than the value has.
        """
        columns = [item for items in self.program.strategies.values() for item in items]
        split = any(
            self.values[column] > 0.5
            for strategy, column in columns
            if strategy.output is not None or any(want.state is not None for want in strategy.wants)
        )
        modules = _modules(self.model.skeleton) if split else {layer.name for layer in self.model.skeleton.layers}
        taken = self._taken()
        found: list[ActivationPlan] = []
        for module, operand in sorted(self.model.graph.outputs.items()):
            if module in modules and operand.source is not None:
                spec = self._spec(operand, taken)
                if any(spec):
                    found += self._constraints(module, spec, self._made(operand))
        fixed = held(self.model)
        present = {source: state for source, state in taken.items() if self.model.folded.operators.of(source) in fixed}
        for module, operand in sorted(self.model.graph.inputs.items()) if split else ():
            if module in modules:
                wanted = self._wanted(module, operand, present)
                if wanted is not None:
                    found += self._constraints(module, wanted, self._made(operand, present), of="input")
        return tuple(sorted(found, key=lambda entry: (entry.of == "input", entry.module)))

    def _constraints(
        self, module: str, spec: Spec, made: Spec | None, of: Literal["output", "input"] = "output"
    ) -> Iterator[ActivationPlan]:
        # The gradient of a value that is gathered is scattered by GSPMD itself: as soon as the sum is computed.
        holds = self.fabric.topology.holds_gradients and MODEL in used_axes(spec)
        gradient = made if holds and made != spec else None
        for name in self.model.skeleton.originals(module):
            yield ActivationPlan(module=name, spec=spec, of=of, gradient=gradient)

    def _made(self, operand: Operand, lying: Mapping[int, State] | None = None) -> Spec | None:
        """The layout in which what makes a value needs its gradient; None if it needs none.

        Without a constraint on the gradient GSPMD computes those of what comes before in the layout of the value's
        users: those of scores of attention, which are larger, by samples. Or it gathers the value from all devices.
        """
        assert operand.source is not None
        strategy = self.strategy(operand.source)
        if strategy.scatters and self.model.graph.operators[operand.source].target == "embedding":
            # No product is computed from the gradient of a lookup: GSPMD chooses how it is added up.
            return None
        state = None if strategy.scatters else strategy.output
        state = (lying or {}).get(operand.source, state)
        seen = seen_as(self.fabric, operand, state)
        return None if seen is None and state is not None else self._lying(operand, seen)

    def _wanted(self, module: str, operand: Operand, lying: Mapping[int, State]) -> Spec | None:
        """The spec in which a module needs a value; None if that is its present one, or if it needs several."""
        assert operand.source is not None
        present = lying.get(operand.source, self.strategy(operand.source).output)
        wants = {
            None if want.state is None else item.origin(want.state)
            for operator in self.model.graph.operators
            if module in operator.modules
            for item, want in zip(operator.operands, self.strategy(operator.index).wants, strict=True)
            if item.source == operand.source
        }
        if len(wants) != 1 or present is None or wants == {present}:
            return None
        state = wants.pop()
        seen = seen_as(self.fabric, operand, state)
        return None if seen is None and state is not None else self._lying(operand, seen)

    def _taken(self) -> dict[int, State]:
        """For each value whose users all want one layout, that layout: the value is best changed to it at once."""
        users: dict[int, set[State]] = {}
        for operator in self.model.graph.operators:
            wants = self.strategy(operator.index).wants
            for operand, want in zip(operator.operands, wants, strict=True):
                if operand.source is not None:
                    state = None if want.state is None else operand.origin(want.state)
                    # A split that the value itself cannot have is made later; so is one of a part of it.
                    later = want.state is not None and state is None
                    later = later or operand.size < self.model.graph.operators[operand.source].size
                    own = self.strategy(operand.source).output
                    users.setdefault(operand.source, set()).add(own if later else state)
        return {source: states.pop() for source, states in users.items() if len(states) == 1}

    def _spec(self, operand: Operand, taken: Mapping[int, State]) -> Spec:
        state: State = None
        if operand.source is not None:
            made = self.strategy(operand.source).output
            state = seen_as(self.fabric, operand, taken.get(operand.source, made))
        return self._lying(operand, state)

    def _lying(self, operand: Operand, state: State) -> Spec:
        spec: list[DimSpec] = [None] * len(operand.shape)
        if operand.batch is not None and DATA in self._mesh.axis_names:
            spec[operand.batch] = DATA
        if state is not None:
            spec[state] = MODEL if spec[state] is None else (DATA, MODEL)
        return tuple(spec)


def whole(spec: Spec) -> Spec:
    """The spec without the data and the model axis."""
    return without(without(spec, MODEL), DATA)


def held(model: Captured) -> set[int]:
    """The operators whose output is constrained if the model axis is used."""
    modules = _modules(model.skeleton)
    outputs = [operand.source for module, operand in model.graph.outputs.items() if module in modules]
    return {model.folded.operators.of(source) for source in outputs if source is not None}


def _modules(skeleton: Skeleton) -> set[str]:
    """Names of the repeated layers, and of all modules with parameters of their own."""
    layers = {layer.name for layer in skeleton.layers}
    return layers | {name for name, module in skeleton.module.named_modules() if module._parameters}


def entries(graph: Graph) -> list[int]:
    """The first operators: those that take the batch and no other activation."""
    return [
        operator.index
        for operator in graph.operators
        if operator.batch is not None and all(operand.source is None for operand in operator.operands)
    ]


def propagated_only(operator: Operator, strategies: list[Strategy]) -> list[Strategy]:
    """Keeps the strategies whose layouts GSPMD propagates from split parameters by itself.

    These do not split the batch or the sequence over the model axis. Other plans, without constraints on activations,
    had twice the predicted communication volume.
    """

    def follows(strategy: Strategy) -> bool:
        if strategy.scatters or (strategy.output is not None and strategy.output == operator.batch):
            return False
        for operand, want in zip(operator.operands, strategy.wants, strict=True):
            if operand.parameter is not None and want.partial:
                return False
            if want.state is not None and want.state == operand.batch:
                return False
        return True

    return [strategy for strategy in strategies if follows(strategy)]


def forced(plan: ShardingPlan, model: Captured, fabric: Fabric) -> list[Filter]:
    """Filters for the strategies that agree with a plan: with its batch, its constraints, and its split parameters."""
    graph, folded = model.graph, model.folded
    split = {
        folded.parameters.of(entry.name): entry.used is None
        for entry in plan.parameters
        if MODEL in used_axes(entry.spec)
    }
    made: dict[int, State] = {}
    if MODEL in plan.batch:
        for index in entries(graph):
            made[folded.operators.of(index)] = graph.operators[index].batch
    # A constraint is applied after the operator: its output may have another layout, but its users get this one.
    outputs, inputs = (
        _held(plan, kind, values, model, fabric)
        for kind, values in (("output", graph.outputs), ("input", graph.inputs))
    )
    taken = dict(outputs.values())

    def takes(operator: Operator, operand: Operand, want: Want) -> bool:
        if operand.parameter is not None and folded.parameters.of(operand.parameter) in split:
            return (want.state is not None) == split[folded.parameters.of(operand.parameter)]
        if operand.source is None:
            return True
        source = folded.operators.of(operand.source)
        # A module's input may be constrained to another layout than the output before it.
        within = dict(inputs[module] for module in operator.modules if module in inputs)
        if source not in taken and source not in within:
            return True
        state = within.get(source, taken.get(source))
        if state is not None and seen_as(fabric, operand, state) is None:
            return True
        return want.state == (None if state is None else operand.dims[state])

    def keep(operator: Operator, strategies: list[Strategy]) -> list[Strategy]:
        found = [
            strategy
            for strategy in strategies
            if all(
                takes(operator, operand, want) for operand, want in zip(operator.operands, strategy.wants, strict=True)
            )
        ]
        if operator.index not in made:
            return found
        return [strategy for strategy in found or strategies if strategy.output == made[operator.index]]

    return [keep]


def _held(
    plan: ShardingPlan, kind: str, values: Mapping[str, Operand], model: Captured, fabric: Fabric
) -> dict[str, tuple[int, State]]:
    """For each module whose output (or input) a plan constrains: the class of the operator, and the state there."""
    specs = {item.module: item.spec for item in plan.activations if item.of == kind}
    found: dict[str, tuple[int, State]] = {}
    for module, operand in sorted(values.items()):
        spec = next((specs[name] for name in model.skeleton.originals(module) if name in specs), None)
        if spec is None or operand.source is None or len(spec) != len(operand.shape):
            continue
        dim = split_dim(spec, MODEL)
        state = None if dim is None else operand.origin(dim)
        if dim is None or (state is not None and fabric.splits(operand.shape, dim, operand.batch)):
            found[module] = (model.folded.operators.of(operand.source), state)
    return found
