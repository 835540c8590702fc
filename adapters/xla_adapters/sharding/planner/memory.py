"""The memory of activations: `kept_shares` of outputs for the backward, and `PeakModel`, what lives at once on TPUs.

The integer program adds up what its choices need, because its costs are linear. But a step frees activations while its
backward makes gradients. So the backward of the chosen plan is walked here, operator by operator. What libtpu keeps,
rounds and pads was read from its own reports on buffers (docs/results/preflight.md).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from xla_adapters.sharding.mesh import DATA, MODEL, Spec
from xla_adapters.sharding.planner.costs import Fabric, Parameter, State, gathered_size, loops, split_dim
from xla_adapters.sharding.planner.graph import Captured, Graph, Operand, Operator
from xla_adapters.sharding.planner.layouts import Strategy

PRODUCTS = frozenset(
    ("linear", "addmm", "mm", "bmm", "baddbmm", "matmul", "conv1d", "conv2d", "conv3d", "scaled_dot_product_attention")
)
_SUMS = ("add", "sub")
# Their results are parts of a value.
_PARTS = ("split", "chunk", "unbind")


def kept_shares(graph: Graph, *, recomputes: bool, rounds: bool) -> Mapping[int, float]:
    """Which part of its output's bytes is kept, by operator: 1, a half, or (left out) nothing.

    An output is kept if anything but an addition uses it.

    Args:
        graph: the operators.
        recomputes: the compiler computes the results of element-wise operators again, if they come from one kept value
            or are no sum; and parts of a value are no copies.
        rounds: what only products use is kept in bfloat16.
    """
    users: dict[int, list[Operator]] = {}
    for operator in graph.operators:
        for operand in operator.operands:
            if operand.source is not None:
                users.setdefault(operand.source, []).append(operator)
    again = recomputed(graph) if recomputes else set[int]()
    found: dict[int, float] = {}
    for operator in graph.operators:
        needed = [user for user in users.get(operator.index, []) if user.target not in _SUMS]
        if recomputes and operator.target in _PARTS:
            continue
        products = [user for user in needed if user.target in PRODUCTS]
        width = _width(operator)
        half = 0.5 if rounds and width == 4 else 1.0
        if operator.index in again:
            if products:
                found[operator.index] = half
        elif needed:
            found[operator.index] = half if len(products) == len(needed) else 1.0
    return found


def recomputed(graph: Graph) -> set[int]:
    """Element-wise operators, except sums of several values: a residual connection would need all layers before it."""
    roots: dict[int, frozenset[int]] = {}
    found: set[int] = set()
    for operator in graph.operators:
        sources = [roots[operand.source] for operand in operator.operands if operand.source is not None]
        behind = frozenset[int]().union(*sources)
        if operator.pointwise and (operator.target not in _SUMS or len(behind) == 1):
            found.add(operator.index)
            roots[operator.index] = behind
        else:
            roots[operator.index] = frozenset((operator.index,))
    return found


def _width(operator: Operator) -> int:
    """Bytes of an element of the output."""
    number = 1
    for size in operator.shape:
        number *= size
    return round(operator.size / number) if number else 0


# The last two dimensions of a value are padded to tiles of this size.
_ROWS, _LANES = 8, 128
_CONVOLUTIONS = ("conv1d", "conv2d", "conv3d")
_NORMS = ("layer_norm", "rms_norm", "group_norm", "batch_norm")
_LOSSES = ("cross_entropy_loss", "nll_loss", "nll_loss_nd")
_ATTENTION = "scaled_dot_product_attention"


def tiled(shape: Sequence[int]) -> int:
    """Elements that a value takes in memory, in the better order of its last two dimensions."""
    if len(shape) < 2:
        return math.prod(shape)
    *lead, first, last = shape
    orders = ((first, last), (last, first))
    return math.prod(lead) * min(_up(rows, _ROWS) * _up(lanes, _LANES) for rows, lanes in orders)


def _up(size: int, step: int) -> int:
    return -(-size // step) * step


@dataclass(frozen=True, kw_only=True)
class Weight:
    """A parameter as a plan stores it.

    Attributes:
        parameter: its class.
        spec: how it is stored.
        kept: whether it is gathered over the data axis once, and kept for the backward.
    """

    parameter: Parameter
    spec: Spec
    kept: bool


@dataclass(kw_only=True)
class _Live:
    """Bytes that live at one time."""

    activations: float
    gradients: float
    gathered: float

    @property
    def total(self) -> float:
        return self.activations + self.gradients + self.gathered


@dataclass(frozen=True, kw_only=True)
class PeakModel:
    """The step of a chosen plan.

    Attributes:
        model: the captured model.
        fabric: costs and mesh.
        strategies: the chosen one, by class of operators.
        weights: by the name that represents a class of parameters.
        copies: by class of operators, bytes of copies of its output in other layouts that are kept for the backward.
    """

    model: Captured
    fabric: Fabric
    strategies: Mapping[int, Strategy]
    weights: Mapping[str, Weight]
    copies: Mapping[int, float]

    def memory(self) -> dict[str, float]:
        """Bytes per device of activations, gradients and gathered parameters at the peak."""
        weights = self.model.folded.weights
        live = _Live(
            activations=sum(weights[item.index] * self._kept[item.index] for item in self.model.graph.operators),
            gradients=sum(item.parameter.count * self._accumulators(item) for item in self.weights.values()),
            gathered=sum(weights[index] * size for index, size in self._gathered.items()),
        )
        peak = _Live(activations=0.0, gradients=0.0, gathered=0.0)
        # Operands of a product whose gradient is reduced wait for it: the logits, while the last layer's backward runs.
        waiting: list[float] = []
        for run in self._runs():
            since = len(waiting)
            for operator, copies in self._visits(run):
                if copies == 1:
                    now = self._working(operator, live)
                    peak = max(peak, now, key=lambda item: item.total)
                kept = copies * self._kept[operator.index]
                if self._waits(operator):
                    waiting.append(kept)
                else:
                    live.activations -= kept
                live.gathered -= copies * self._gathered.get(operator.index, 0.0)
                live.gradients += copies * self._made(operator)
            for _ in range(since):
                live.activations -= waiting.pop(0)
        peak = max(peak, live, key=lambda item: item.total)
        return {"activations": peak.activations, "gradients": peak.gradients, "gathered": peak.gathered}

    def _runs(self) -> Iterator[list[Operator]]:
        """The operators in the order of the backward, those of one layer together."""
        names = {layer.name for layer in self.model.skeleton.layers}

        def layer(operator: Operator) -> tuple[str, int]:
            inside = [module for module in operator.modules if module in names]
            return (inside[-1] if inside else "", self.model.folded.weights[operator.index])

        for _, run in itertools.groupby(reversed(self.model.graph.operators), key=layer):
            yield list(run)

    def _visits(self, run: Sequence[Operator]) -> Iterator[tuple[Operator, int]]:
        """The operators of a layer, and those of the layers that it represents: the first, those between, the last."""
        number = self.model.folded.weights[run[0].index]
        for copies in (1, number - 2, 1) if number > 1 else (1,):
            if copies:
                for operator in run:
                    yield operator, copies

    def _working(self, operator: Operator, live: _Live) -> _Live:
        """What lives while the gradients of an operator's inputs are computed."""
        strategy = self._strategy(operator)
        activations, gradients, gathered = live.activations, live.gradients, live.gathered
        if operator.index in self.model.folded.recomputed:
            activations += sum(self._recomputed_layer(operator))
        if operator.target == _ATTENTION:
            activations += self._scores(operator)
        elif operator.target in PRODUCTS:
            activations += self._operands(operator, strategy)
        elif operator.target in _NORMS:
            activations += self._size(operator, strategy.output)
        for operand, want in zip(operator.operands, strategy.wants, strict=True):
            if operand.parameter is None:
                continue
            weight = self._weight(operand)
            if weight.parameter.trainable and self._reduced(weight):
                split = want.state is not None or split_dim(weight.spec, MODEL) is not None
                gradients += weight.parameter.size / (self.fabric.model if split else 1)
            if operator.target in PRODUCTS and not weight.kept and split_dim(weight.spec, DATA) is not None:
                gathered += self._gathered_whole(weight, want.state)
        return _Live(activations=activations, gradients=gradients, gathered=gathered)

    def _operands(self, operator: Operator, strategy: Strategy) -> float:
        """What a product's backward makes: gradients of its inputs and of what follows, and inputs computed again."""
        size = 0.0
        if self._looped(operator) or operator.index not in self._before_loss:
            size += self._rounded(operator) * self._size(operator, strategy.output)
        for operand, want in zip(operator.operands, strategy.wants, strict=True):
            if operand.source is not None:
                # Input and gradient in bfloat16, or the gradient alone.
                derived = operand.source in self._derived
                size += (2 * self._rounded(operand) if derived else 1.0) * self._size(operand, want.state)
        return size

    def _looped(self, operator: Operator) -> bool:
        """Whether the gradient of an operator's weight is scattered by a loop."""
        weights = [self._weight(operand) for operand in operator.operands if operand.parameter is not None]
        return any(loops(weight.parameter, weight.spec, self.fabric) for weight in weights)

    def _recomputed_layer(self, operator: Operator) -> Iterator[float]:
        """What the operators before one in its recomputed layer keep while the layer's backward runs."""
        layers = {layer.name for layer in self.model.skeleton.layers} & set(operator.modules)
        for other in self.model.graph.operators[: operator.index + 1]:
            if other.index in self.model.folded.recomputed and layers & set(other.modules):
                yield self._once[other.index]

    @cached_property
    def _again(self) -> set[int]:
        return recomputed(self.model.graph)

    @cached_property
    def _before_loss(self) -> set[int]:
        """Operators whose output a loss takes."""
        return {
            operand.source
            for operator in self.model.graph.operators
            if operator.target in _LOSSES
            for operand in operator.operands
            if operand.source is not None
        }

    @cached_property
    def _once(self) -> dict[int, float]:
        """By operator, bytes of its output (and besides it) that are kept for the backward, in each layer."""
        topology = self.fabric.topology
        shares = kept_shares(self.model.graph, recomputes=topology.recomputes, rounds=topology.rounds_products)
        found = {}
        for operator in self.model.graph.operators:
            share = shares.get(operator.index, 0.0)
            if operator.index in self.model.graph.needed and share:
                share = 1.0 if operator.index in self._derived else 1.0 + self._rounded(operator)
            elif operator.index in self._derived:
                share = 0.0
            size = share * self._size_of_output(operator)
            size += self._rounded(operator) * self.copies.get(self.model.folded.operators.of(operator.index), 0.0)
            if operator.target == _ATTENTION:
                size += self._scores(operator)
            elif operator.target in _CONVOLUTIONS:
                size += self._image(operator)
            found[operator.index] = size
        return found

    @cached_property
    def _derived(self) -> set[int]:
        """Operators whose output, as one product takes it, is computed again for the product's backward.

        If several products take it, or one whose weight's gradient is scattered by a loop, it is kept in bfloat16.
        """
        found = set()
        for operator in self.model.graph.operators:
            if operator.index in self._again or operator.index in self.model.graph.needed:
                products = [user for user, _ in self._users.get(operator.index, []) if user.target in PRODUCTS]
                if len(products) == 1 and not self._looped(products[0]):
                    found.add(operator.index)
        return found

    @cached_property
    def _users(self) -> dict[int, list[tuple[Operator, Operand]]]:
        users: dict[int, list[tuple[Operator, Operand]]] = {}
        for operator in self.model.graph.operators:
            for operand in operator.operands:
                if operand.source is not None:
                    users.setdefault(operand.source, []).append((operator, operand))
        return users

    @cached_property
    def _kept(self) -> dict[int, float]:
        return {index: 0.0 if index in self.model.folded.recomputed else size for index, size in self._once.items()}

    @cached_property
    def _gathered(self) -> dict[int, float]:
        """By the first product that uses a gathered parameter, the bytes of the copy, which live until its backward."""
        found: dict[int, float] = {}
        seen: set[str] = set()
        for operator in self.model.graph.operators:
            if operator.target not in PRODUCTS:
                continue
            for operand, want in zip(operator.operands, self._strategy(operator).wants, strict=True):
                if operand.parameter is None or operand.parameter in seen:
                    continue
                seen.add(operand.parameter)
                weight = self._weight(operand)
                over_model = split_dim(weight.spec, MODEL) is not None and want.state is None
                if weight.kept or over_model:
                    size = self._gathered_whole(weight, want.state)
                    found[operator.index] = found.get(operator.index, 0.0) + size
        return found

    @cached_property
    def _last_users(self) -> dict[int, list[Weight]]:
        """By operator, the parameters that no later operator uses: their gradients come first from it."""
        last = {
            operand.parameter: operator.index
            for operator in self.model.graph.operators
            for operand in operator.operands
            if operand.parameter is not None
        }
        found: dict[int, list[Weight]] = {}
        for name, index in last.items():
            found.setdefault(index, []).append(self.weights[self.model.folded.parameters.of(name)])
        return found

    def _made(self, operator: Operator) -> float:
        """Bytes of gradients that an operator's backward leaves."""
        size = 0.0
        for weight in self._last_users.get(operator.index, []):
            if weight.parameter.trainable:
                size += self._shard(weight) - self._accumulators(weight)
        return size

    def _accumulators(self, weight: Weight) -> float:
        """Bytes of the two values that a loop adds a gradient up in; they live from the start."""
        return 2 * self._shard(weight) if loops(weight.parameter, weight.spec, self.fabric) else 0.0

    def _shard(self, weight: Weight) -> float:
        return weight.parameter.size / self.fabric.mesh.shards(weight.spec)

    def _gathered_whole(self, weight: Weight, state: State) -> float:
        return gathered_size(weight.parameter, self.fabric) / (1 if state is None else self.fabric.model)

    def _reduced(self, weight: Weight) -> bool:
        """Whether the gradient is made whole before it is reduced over the data axis."""
        return self.fabric.data > 1 and not loops(weight.parameter, weight.spec, self.fabric)

    def _waits(self, operator: Operator) -> bool:
        return operator.index in self._before_loss and any(
            operand.parameter is not None and self._reduced(self._weight(operand)) for operand in operator.operands
        )

    def _strategy(self, operator: Operator) -> Strategy:
        return self.strategies[self.model.folded.operators.of(operator.index)]

    def _weight(self, operand: Operand) -> Weight:
        return self.weights[self.model.folded.parameters.of(operand.parameter or "")]

    def _rounded(self, item: Operand | Operator) -> float:
        """The share of a value's bytes that it takes as the operand of a product."""
        number = math.prod(item.shape)
        return 0.5 if number and round(item.size / number) == 4 else 1.0

    def _size(self, item: Operand | Operator, state: State) -> float:
        """Bytes of a value on one device, with padding."""
        number = math.prod(item.shape)
        if not number:
            return 0.0
        fabric, shape = self.fabric, list(item.shape)
        for dim, parts in ((item.batch, fabric.data), (state, fabric.model)):
            if dim is not None:
                shape[dim] = -(-shape[dim] // parts)
        return tiled(shape) * item.size / number

    def _size_of_output(self, operator: Operator) -> float:
        """Bytes of an operator's output on one device, in the shape in which its users take it."""
        state = self._strategy(operator).output
        if operator.target in _CONVOLUTIONS and len(operator.shape) > 2:
            channels, pixels = operator.shape[1], math.prod(operator.shape[2:])
            padding = tiled((channels, pixels)) / (channels * pixels)
            return self.fabric.local(operator, state) * padding
        for user, operand in self._users.get(operator.index, []):
            if user.target == _ATTENTION and operand.size == operator.size:
                return self._size(operand, None if state is None else operand.dims[state])
        return self._size(operator, state)

    def _scores(self, operator: Operator) -> float:
        """Bytes of the weights of attention, queries by keys, with padding."""
        query, key = operator.operands[0], operator.operands[1]
        strategy = self._strategy(operator)
        sizes, parts = (query.shape[-2], key.shape[-2]), 1
        whole = query.source is not None and strategy.wants[0].state is None
        if whole and self._strategy(self.model.graph.operators[query.source or 0]).output is not None:
            # If heads do not divide, GSPMD splits a query that is split before over as many devices as do.
            parts = math.gcd(query.shape[-3], self.fabric.model)
        return strategy.keeps * tiled(sizes) / math.prod(sizes) / parts

    def _image(self, operator: Operator) -> float:
        """Bytes of an image in bfloat16 as a convolution reads it: few channels are rows, and the batch is padded."""
        item = operator.operands[0]
        if not item.free or item.batch != 0 or len(item.shape) < 3:
            return 0.0
        channels, rows = _up(item.shape[1], 4), item.shape[0] // self.fabric.data
        return 2.0 * math.prod(item.shape[2:]) * channels * _up(rows, _LANES)
