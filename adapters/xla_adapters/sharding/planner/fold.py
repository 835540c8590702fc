"""`fold`: groups the operators and parameters of equal layers into classes that share one choice."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from xla_adapters.sharding.planner.graph import Graph, Operand, Operator
from xla_adapters.sharding.planner.layers import Layer, Skeleton

_T = TypeVar("_T", bound=Hashable)


class Classes(Generic[_T]):
    """Disjoint sets (union-find); each set has a representative."""

    def __init__(self) -> None:
        self._parents: dict[_T, _T] = {}

    def of(self, item: _T) -> _T:
        """The representative of an item's set."""
        while item in self._parents:
            item = self._parents[item]
        return item

    def join(self, first: _T, second: _T) -> None:
        """Merges two sets; the representative is that of the first item."""
        first, second = self.of(first), self.of(second)
        if first != second:
            self._parents[second] = first


@dataclass(frozen=True, kw_only=True)
class Folded:
    """Classes of operators and parameters that share one choice.

    Attributes:
        operators: classes of operators, by index.
        parameters: classes of parameters, by name.
        weights: for each operator, the number of operators of the user's model that it represents.
        recomputed: operators in layers with gradient checkpointing, whose outputs are not kept.
        complete: whether each layer that represents others was found equal to its neighbour in the graph, too.
    """

    operators: Classes[int]
    parameters: Classes[str]
    weights: Mapping[int, int]
    recomputed: frozenset[int]
    complete: bool


def fold(graph: Graph, skeleton: Skeleton) -> Folded:
    """Joins corresponding operators and parameters of equal layers, if their graphs are equal."""
    operators: Classes[int] = Classes()
    parameters: Classes[str] = Classes()
    groups: dict[int, list[Layer]] = {}
    for layer in skeleton.layers:
        groups.setdefault(layer.group, []).append(layer)
    complete = True
    inside: dict[str, list[Operator]] = {layer.name: [] for layer in skeleton.layers}
    for operator in graph.operators:
        for module in operator.modules:
            if module in inside:
                inside[module].append(operator)
    for layers in groups.values():
        first, *others = layers
        for layer in others:
            if not _equal(inside[first.name], inside[layer.name]):
                complete = complete and all(len(item.keys) == 1 for item in layers)
                continue
            for one, two in zip(inside[first.name], inside[layer.name], strict=True):
                operators.join(one.index, two.index)
                for a, b in zip(one.operands, two.operands, strict=True):
                    if a.parameter is not None and b.parameter is not None:
                        parameters.join(a.parameter, b.parameter)
    reduced = any(len(layer.keys) > 1 for layer in skeleton.layers)
    if reduced:
        for name, first_name in skeleton.same.items():
            parameters.join(first_name, name)
    weights = {
        operator.index: max((layer.weight for layer in skeleton.layers if layer.name in operator.modules), default=1)
        for operator in graph.operators
    }
    return Folded(
        operators=operators,
        parameters=parameters,
        weights=weights,
        recomputed=frozenset(_recomputed(graph, skeleton)),
        complete=complete,
    )


def _recomputed(graph: Graph, skeleton: Skeleton) -> set[int]:
    """Operators in layers whose attribute `gradient_checkpointing` (of transformers) is True, except their outputs."""
    layers = {
        layer.name
        for layer in skeleton.layers
        if getattr(skeleton.module.get_submodule(layer.name), "gradient_checkpointing", False) is True
    }
    return {operator.index for operator in graph.operators if any(module in layers for module in operator.modules)} - {
        operand.source for module, operand in graph.outputs.items() if module in layers and operand.source is not None
    }


def _equal(first: list[Operator], second: list[Operator]) -> bool:
    """Whether two lists of operators compute the same: equal operators, shapes and connections."""
    if len(first) != len(second):
        return False
    places = [{operator.index: place for place, operator in enumerate(items)} for items in (first, second)]
    return all(_form(one, places[0]) == _form(two, places[1]) for one, two in zip(first, second, strict=True))


def _form(operator: Operator, places: Mapping[int, int]) -> tuple[object, ...]:
    return (
        operator.target,
        operator.shape,
        operator.batch,
        operator.size,
        tuple(_wire(operand, places) for operand in operator.operands),
        tuple(item for item in operator.args if isinstance(item, (int, float, str))),
    )


def _wire(operand: Operand, places: Mapping[int, int]) -> tuple[object, ...]:
    place = None if operand.source is None else places.get(operand.source, "outside")
    return (operand.shape, operand.batch, operand.dims, place, operand.parameter is not None)
