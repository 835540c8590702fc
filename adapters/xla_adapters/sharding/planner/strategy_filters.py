"""Filters that reduce the strategies of operators to those that GSPMD, or a given plan, allows."""

from __future__ import annotations

from collections.abc import Mapping

from xla_adapters.sharding.mesh import MODEL, used_axes
from xla_adapters.sharding.plan import ShardingPlan
from xla_adapters.sharding.planner.fold import Folded
from xla_adapters.sharding.planner.graph import Graph, Operand, Operator
from xla_adapters.sharding.planner.layers import Skeleton
from xla_adapters.sharding.planner.problem import Filter
from xla_adapters.sharding.planner.reshard import seen_as
from xla_adapters.sharding.planner.result import entries
from xla_adapters.sharding.planner.storage import split_dim
from xla_adapters.sharding.planner.strategies import Rules, Strategy
from xla_adapters.sharding.planner.strategies.base import State, Want


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


def forced(plan: ShardingPlan, graph: Graph, folded: Folded, skeleton: Skeleton, rules: Rules) -> list[Filter]:
    """Filters for the strategies that agree with a plan: with its batch, its constraints, and its split parameters."""
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
        _held(plan, kind, values, folded, skeleton, rules)
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
        if state is not None and seen_as(rules, operand, state) is None:
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
    plan: ShardingPlan,
    kind: str,
    values: Mapping[str, Operand],
    folded: Folded,
    skeleton: Skeleton,
    rules: Rules,
) -> dict[str, tuple[int, State]]:
    """For each module whose output (or input) a plan constrains: the class of the operator, and the state there."""
    specs = {item.module: item.spec for item in plan.activations if item.of == kind}
    found: dict[str, tuple[int, State]] = {}
    for module, operand in sorted(values.items()):
        spec = next((specs[name] for name in skeleton.originals(module) if name in specs), None)
        if spec is None or operand.source is None or len(spec) != len(operand.shape):
            continue
        dim = split_dim(spec, MODEL)
        state = None if dim is None else operand.origin(dim)
        if dim is None or (state is not None and rules.splits(operand.shape, dim, operand.batch)):
            found[module] = (folded.operators.of(operand.source), state)
    return found
