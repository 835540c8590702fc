"""`Graph`: the captured forward as operators that have a choice of layouts.

Views, casts and unary functions are no operators here: they are part of how a later operator sees an earlier value
(`Operand.dims`, which `VIEWS` compute). Values without a gradient (token ids, masks, positions) are left out, too: they
are small or cheap to compute, so they are assumed to be available in any layout. `fold` groups the operators and
parameters of equal layers into classes that share one choice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import getitem
from typing import Any, Generic, TypeVar

import torch
from torch import fx

from xla_adapters.sharding.planner.capture import Capture, Layer, Skeleton, shape_of, tensor_of

Shape = tuple[int, ...]
# For each dimension of the input, the dimension of the output that has its split; None if the split is lost.
Dims = tuple[int | None, ...]


def identity(rank: int) -> Dims:
    """The mapping of a view that changes nothing."""
    return tuple(range(rank))


def compose(first: Dims, second: Dims) -> Dims:
    """The mapping of two views, one after the other."""
    return tuple(None if dim is None else second[dim] for dim in first)


def reshaped(before: Shape, after: Shape) -> Dims:
    """The mapping of `view` and `reshape`.

    Dimensions are taken in the smallest groups of equal product. In a group, only the outermost dimension of the input
    can be split contiguously; it maps to the outermost dimension of the output.
    """
    result: list[int | None] = [None] * len(before)
    i = j = 0
    while i < len(before) and j < len(after):
        ins, outs = [i], [j]
        left, right = before[i], after[j]
        while left != right:
            if left < right and ins[-1] + 1 < len(before):
                ins.append(ins[-1] + 1)
                left *= before[ins[-1]]
            elif outs[-1] + 1 < len(after):
                outs.append(outs[-1] + 1)
                right *= after[outs[-1]]
            else:
                return tuple(result)
        outer_in = next((dim for dim in ins if before[dim] > 1), ins[0])
        outer_out = next((dim for dim in outs if after[dim] > 1), outs[0])
        result[outer_in] = outer_out
        i, j = ins[-1] + 1, outs[-1] + 1
    return tuple(result)


def broadcast(before: Shape, after: Shape) -> Dims:
    """The mapping of a broadcast: aligned at the last dimension; an expanded dimension is lost."""
    offset = len(after) - len(before)
    return tuple(
        dim + offset if dim + offset >= 0 and after[dim + offset] == size else None for dim, size in enumerate(before)
    )


def _transposed(before: Shape, _after: Shape, args: Sequence[Any]) -> Dims:
    rank = len(before)
    first, second = (args[0] % rank, args[1] % rank) if len(args) >= 2 else (rank - 2, rank - 1)
    order = list(range(rank))
    if rank > 1:
        order[first], order[second] = second, first
    return tuple(order)


def _permuted(before: Shape, _after: Shape, args: Sequence[Any]) -> Dims:
    order = [dim % len(before) for dim in args[0]]
    return tuple(order.index(dim) for dim in range(len(before)))


def _selected(before: Shape, _after: Shape, args: Sequence[Any]) -> Dims:
    gone = args[0] % len(before)
    return tuple(None if dim == gone else dim - (dim > gone) for dim in range(len(before)))


def _unsqueezed(before: Shape, after: Shape, args: Sequence[Any]) -> Dims:
    new = args[0] % len(after)
    return tuple(dim + (dim >= new) for dim in range(len(before)))


def _reshaped(before: Shape, after: Shape, _args: Sequence[Any]) -> Dims:
    return reshaped(before, after)


def _broadcast(before: Shape, after: Shape, _args: Sequence[Any]) -> Dims:
    return broadcast(before, after)


# By name of the operator; called with the shapes before and after, and the arguments after the tensor.
VIEWS: dict[str, Callable[[Shape, Shape, Sequence[Any]], Dims]] = {
    **dict.fromkeys(
        ("view", "reshape", "_unsafe_view", "flatten", "unflatten", "squeeze", "view_as", "reshape_as"), _reshaped
    ),
    **dict.fromkeys(("transpose", "swapaxes", "t", "numpy_T", "mT"), _transposed),
    "permute": _permuted,
    "select": _selected,
    "unsqueeze": _unsqueezed,
    **dict.fromkeys(
        (
            "expand", "expand_as", "slice", "contiguous", "clone", "alias", "to", "_to_copy", "type_as", "dropout",
            "feature_dropout", "lift_fresh_copy", "float", "bfloat16", "half", "double", "triu", "tril", "detach_",
            "constant_pad_nd", "pad",
        ),
        _broadcast,
    ),
}  # fmt: skip


def bytes_of(shape: Shape, itemsize: int) -> float:
    """Bytes of a tensor."""
    return float(math.prod(shape)) * itemsize


# Unary functions whose result is not kept for the backward, or is cheap.
_KEEPS_NOTHING = frozenset(("add", "sub", "neg", "rsub", "mul", "div", "sum", "mean", "cat", "dropout", "rsqrt", "pow"))

# Unary functions whose gradient needs their input.
_NEEDS_INPUT = frozenset(("gelu", "silu", "mish", "softplus", "hardswish", "elu", "log_sigmoid", "logsigmoid"))


@dataclass(frozen=True, kw_only=True)
class Operand:
    """An input of an operator: a view of another operator's output, or of a parameter.

    Attributes:
        shape: of the view.
        batch: the dimension of the view that is the batch; None if there is none.
        size: bytes of the view.
        source: index of the operator whose output it is a view of; None for a parameter or a free value.
        parameter: name of the parameter it is a view of.
        dims: for each dimension of the source's output, or of the parameter, the dimension of the view.
    """

    shape: Shape
    batch: int | None = None
    size: float = 0.0
    source: int | None = None
    parameter: str | None = None
    dims: Dims = ()

    @property
    def free(self) -> bool:
        """Whether the value is available in any layout (it needs no gradient)."""
        return self.source is None and self.parameter is None

    def origin(self, dim: int) -> int | None:
        """The dimension of the source or parameter for a dimension of the view; None if there is none."""
        return self.dims.index(dim) if dim in self.dims else None


@dataclass(frozen=True, kw_only=True)
class Operator:
    """An operator that has a choice of layouts.

    Attributes:
        index: its position in the graph.
        target: its name without namespace and overload, e.g. `"linear"`.
        namespace: e.g. `"aten"`.
        args, kwargs: as called; tensors are `Operand`s.
        operands: the tensors among the arguments, in order.
        shape, batch, size: of its (first) output, see `Operand`.
        modules: names of the modules it runs in, outermost first.
        pointwise: whether it is element-wise.
    """

    index: int
    target: str
    namespace: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    operands: tuple[Operand, ...]
    shape: Shape
    batch: int | None
    size: float
    modules: tuple[str, ...]
    pointwise: bool

    def argument(self, position: int, name: str, default: Any = None) -> Any:
        """An argument, by position or name."""
        return self.args[position] if position < len(self.args) else self.kwargs.get(name, default)


@dataclass(kw_only=True)
class Graph:
    """The operators of a model, and the inputs and outputs of its modules.

    Attributes:
        operators: in execution order.
        kept: by index of an operator, unary functions of its output that the backward needs: (dims, bytes, batch).
        needed: indices of operators whose output itself, not only a function of it, the backward needs.
        outputs: by module, the value that is its output, if there is exactly one.
        inputs: by module, the value that is its input, if there is exactly one.
        unknown: names of operators without a rule; filled in by the planner.
    """

    operators: list[Operator] = field(default_factory=list)
    kept: dict[int, list[tuple[Dims, float, int | None]]] = field(default_factory=dict)
    needed: set[int] = field(default_factory=set)
    outputs: dict[str, Operand] = field(default_factory=dict)
    inputs: dict[str, Operand] = field(default_factory=dict)
    unknown: set[str] = field(default_factory=set)


def build(capture: Capture) -> Graph:
    """Converts a captured graph."""
    return _Builder(capture=capture).build()


@dataclass(kw_only=True)
class _Builder:
    """Converts the nodes of a captured graph in order; `seen` has the operand that each node became."""

    capture: Capture
    graph: Graph = field(default_factory=Graph)
    seen: dict[fx.Node, Operand] = field(default_factory=dict)

    def build(self) -> Graph:
        for node in self.capture.nodes:
            if node.op in ("placeholder", "call_function", "get_attr") and shape_of(node) is not None:
                self.seen[node] = self._visit(node)
        self._module_outputs()
        self._module_inputs()
        return self.graph

    def _operand(self, node: fx.Node, **source: Any) -> Operand:
        value = tensor_of(node)
        shape = shape_of(node) or ()
        return Operand(
            shape=shape,
            batch=self.capture.batch.get(node),
            size=bytes_of(shape, value.element_size()) if value is not None else 0.0,
            **source,
        )

    def _visit(self, node: fx.Node) -> Operand:
        if node in self.capture.parameters:
            shape = shape_of(node) or ()
            return self._operand(node, parameter=self.capture.parameters[node], dims=identity(len(shape)))
        inputs = [self.seen[item] for item in node.all_input_nodes if item in self.seen]
        live = [item for item in inputs if not item.free]
        target, namespace = _name_of(node)
        no_gradient = target == "wrap_with_set_grad_enabled" and node.args[0] is False
        if not live or target == "detach" or no_gradient or not _has_gradient(node):
            return self._operand(node)
        if node.target is getitem:
            viewed = self._item(node, live[0])
            if viewed is not None:
                return viewed
        elif len(live) == 1 and (not live[0].parameter or target in VIEWS):
            viewed = self._view(node, target, live[0], inputs[0] is live[0])
            if viewed is not None:
                return viewed
        return self._operator(node, target, namespace)

    def _view(self, node: fx.Node, target: str, seen: Operand, first: bool) -> Operand | None:
        """The operand for a node that is a view or a unary function of one value; None for other nodes."""
        shape = shape_of(node) or ()
        if target in VIEWS and first:
            dims = VIEWS[target](seen.shape, shape, tuple(node.args[1:]))
            dims = tuple(
                None if dim is None or (target in ("slice", "pad", "constant_pad_nd") and shape[dim] != size) else dim
                for dim, size in zip(dims, seen.shape, strict=True)
            )
        elif _is_pointwise(node) and seen.shape and math.prod(shape) >= math.prod(seen.shape):
            dims = broadcast(seen.shape, shape)
        else:
            return None
        result = self._operand(node, source=seen.source, parameter=seen.parameter, dims=compose(seen.dims, dims))
        if seen.source is not None and target not in VIEWS and target not in _KEEPS_NOTHING:
            self.graph.kept.setdefault(seen.source, []).append((result.dims, result.size, result.batch))
            if target in _NEEDS_INPUT:
                self.graph.needed.add(seen.source)
        return result

    def _item(self, node: fx.Node, seen: Operand) -> Operand | None:
        """The operand for one of several outputs."""
        source = node.args[0]
        shape = shape_of(node) or ()
        if isinstance(source, fx.Node) and _name_of(source)[0] == "unbind":
            dims = VIEWS["select"](seen.shape, shape, source.args[1:] or (0,))
            return self._operand(node, source=seen.source, parameter=seen.parameter, dims=compose(seen.dims, dims))
        if isinstance(source, fx.Node) and _name_of(source)[0] in _SPLITS:
            return None
        if seen.source is None or node.args[1] != 0 or shape != seen.shape:
            return self._operand(node, source=seen.source, parameter=seen.parameter, dims=(None,) * len(seen.dims))
        return seen

    def _operator(self, node: fx.Node, target: str, namespace: str) -> Operand:
        if node.target is not getitem and target in _SPLITS:
            # Each part is an operator (its `getitem`); the list of parts stands for the input.
            return next(self.seen[item] for item in node.all_input_nodes if item in self.seen)
        operands: list[Operand] = []

        def replace(item: Any) -> Any:
            if isinstance(item, fx.Node):
                if item not in self.seen:
                    return None
                operands.append(self.seen[item])
                return self.seen[item]
            return item

        args = fx.node.map_aggregate(node.args, replace)
        kwargs = fx.node.map_aggregate(node.kwargs, replace)
        result = self._operand(node)
        if node.target is getitem:
            target, namespace = "split", "aten"
        index = len(self.graph.operators)
        self.graph.operators.append(
            Operator(
                index=index,
                target=target,
                namespace=namespace,
                args=tuple(args),
                kwargs=dict(kwargs),
                operands=tuple(operands),
                shape=result.shape,
                batch=result.batch,
                size=result.size,
                modules=self.capture.modules[node],
                pointwise=_is_pointwise(node),
            )
        )
        return self._operand(node, source=index, dims=identity(len(result.shape)))

    def _module_outputs(self) -> None:
        """Finds each module's output: the only value made inside that is used outside."""
        leaving: dict[str, list[Operand]] = {}
        for node in self.capture.nodes:
            if node not in self.seen or self.seen[node].source is None:
                continue
            # A cast to the same type inside a module is still the value of the module that made it.
            made_in = self.graph.operators[self.seen[node].source or 0].modules
            for module in self.capture.modules[node]:
                if module in made_in and any(module not in self.capture.modules[user] for user in node.users):
                    leaving.setdefault(module, []).append(self.seen[node])
        self.graph.outputs = {module: values[0] for module, values in leaving.items() if len(values) == 1}

    def _module_inputs(self) -> None:
        """Finds each module's input: the only value made outside that is used inside."""
        entering: dict[str, list[Operand]] = {}
        for node in self.capture.nodes:
            if node not in self.seen or self.seen[node].source is None:
                continue
            used_in = {module for user in node.users for module in self.capture.modules[user]}
            for module in used_in - set(self.capture.modules[node]):
                entering.setdefault(module, []).append(self.seen[node])
        self.graph.inputs = {module: values[0] for module, values in entering.items() if len(values) == 1}


_SPLITS = frozenset(("split", "chunk", "split_with_sizes", "tensor_split", "unbind", "unsafe_chunk", "unsafe_split"))


def _name_of(node: fx.Node) -> tuple[str, str]:
    if isinstance(node.target, torch._ops.OpOverload):
        namespace, name = node.target._schema.name.split("::")
        # In-place variants have the same layouts.
        return (name.rstrip("_") or name, namespace)
    return (getattr(node.target, "__name__", str(node.target)), "")


def _is_pointwise(node: fx.Node) -> bool:
    # torch does not tag all overloads of these as pointwise.
    named = _name_of(node)[0] in ("where", "masked_fill", "clamp", "lerp")
    return named or (isinstance(node.target, torch._ops.OpOverload) and torch.Tag.pointwise in node.target.tags)


def _has_gradient(node: fx.Node) -> bool:
    value = tensor_of(node)
    return value is not None and (value.is_floating_point() or value.is_complex())


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


@dataclass(frozen=True, kw_only=True)
class Captured:
    """A captured model.

    Attributes:
        graph: its operators.
        folded: which of them share a choice.
        skeleton: the copy of the model that was captured.
    """

    graph: Graph
    folded: Folded
    skeleton: Skeleton
