"""Several runs of a graph as one computation, built with torch_xla 2.9's `xla_builder`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch_xla
import torch_xla.core.xla_builder as xb

from xla_adapters.runtime.graphs import Key

_C = torch_xla._XLAC


def repeated_computation(
    graph: bytes,
    feed: Mapping[Key, torch.Tensor],
    varying: Sequence[int],
    carried: Mapping[int, int],
    each: Sequence[int],
    *,
    runs: int,
    rolled: bool,
) -> tuple[Any, tuple[Key, ...]]:
    """Builds the computation; compiles nothing.

    Args:
        graph: of one run, as `Executables.text` gives it.
        feed: a tensor of the right shape for each parameter of the computation, in their order.
        varying, carried, each, runs, rolled: as of `Executables.compile_repeated`.

    Returns:
        The computation, and its results as `RepeatedGraph.results`.
    """
    body = _C._xla_op_computation_from_module_proto("step", graph)
    builder = xb.create_builder("steps")
    params = {
        key: xb.mkparam(builder, number, xb.tensor_shape(tensor)) for number, (key, tensor) in enumerate(feed.items())
    }
    number_of_inputs = len({index for index, _ in feed})
    one_run = _Run(body, number_of_inputs, list(varying), dict(carried), list(each))
    outputs = (one_run.rolled if rolled else one_run.unrolled)(params, runs)
    return xb.Op.tuple(list(outputs.values())).build("steps"), tuple(outputs)


class _Run:
    """One run of a graph, as a part of another.

    Args:
        computation: the graph.
        inputs: how many it has.
        varying, carried, each: as of `compile_repeated`.
    """

    def __init__(
        self, computation: Any, inputs: int, varying: list[int], carried: dict[int, int], each: list[int]
    ) -> None:
        self._computation = computation
        self._inputs = range(inputs)
        self._varying = varying
        self._shared = [index for index in self._inputs if index not in set(varying)]
        self._carried = carried
        self._each = each

    def _call(self, inputs: Mapping[int, Any]) -> list[Any]:
        results = xb.Op.call(self._computation, [inputs[index] for index in self._inputs])
        return [results.get_tuple_element(index) for index in range(results.shape().tuple_size())]

    def _last(self, state: Mapping[int, Any]) -> dict[Key, Any]:
        return {(output, None): state[index] for index, output in self._carried.items()}

    def unrolled(self, params: Mapping[Key, Any], runs: int) -> dict[Key, Any]:
        """One run behind the other."""
        state = {index: params[index, None] for index in self._shared}
        results: dict[Key, Any] = {}
        for run in range(runs):
            outputs = self._call({**state, **{index: params[index, run] for index in self._varying}})
            state.update({index: outputs[output] for index, output in self._carried.items()})
            results.update({(output, run): outputs[output] for output in self._each})
        return {**self._last(state), **results}

    def rolled(self, params: Mapping[Key, Any], runs: int) -> dict[Key, Any]:
        """A loop, in which each run takes its part of the stacked inputs and leaves its part of the outputs."""
        builder = next(iter(params.values())).builder()
        shapes = self._result_shapes({index: op.shape() for (index, _), op in params.items()})
        stacked = [
            xb.Op.concat_in_dim([_with_leading(params[index, run]) for run in range(runs)], 0)
            for index in self._varying
        ]
        rooms = [
            xb.Op.zero(builder, dtype=shapes[output].dtype).broadcast((runs, *shapes[output].sizes))
            for output in self._each
        ]
        begins, ends = len(self._shared), len(self._shared) + len(stacked)

        def body(count: Any, *rest: Any) -> Any:
            state, given, room = dict(zip(self._shared, rest, strict=False)), rest[begins:ends], rest[ends:]
            own = {index: _part(whole, count) for index, whole in zip(self._varying, given, strict=True)}
            outputs = self._call({**state, **own})
            state.update({index: outputs[output] for index, output in self._carried.items()})
            filled = [_put(whole, outputs[output], count) for whole, output in zip(room, self._each, strict=True)]
            one = xb.Op.one(count.builder(), dtype=count.shape().dtype)
            return xb.Op.tuple([count + one, *(state[index] for index in self._shared), *given, *filled])

        def goes_on(count: Any, *rest: Any) -> Any:
            return count < xb.Op.scalar(count.builder(), runs, dtype=count.shape().dtype)

        start = xb.Op.zero(builder, dtype=xb.Type.S32)
        loop = xb.Op.mkwhile([start, *(params[index, None] for index in self._shared), *stacked, *rooms], goes_on, body)
        left = [loop.get_tuple_element(number) for number in range(1, 1 + ends + len(rooms))]
        return {
            **self._last(dict(zip(self._shared, left, strict=False))),
            **{
                (output, run): _part(whole, xb.Op.scalar(builder, run, dtype=xb.Type.S32))
                for output, whole in zip(self._each, left[ends:], strict=True)
                for run in range(runs)
            },
        }

    def _result_shapes(self, shapes: Mapping[int, Any]) -> list[Any]:
        builder = xb.create_builder("shapes")
        results = self._call({index: xb.mkparam(builder, index, shapes[index]) for index in self._inputs})
        return [op.shape() for op in results]


def _with_leading(op: Any) -> Any:
    return op.reshape((1, *op.shape().sizes))


def _start(op: Any, index: Any) -> list[Any]:
    zero = xb.Op.zero(index.builder(), dtype=index.shape().dtype)
    return [index, *[zero] * (op.shape().rank - 1)]


def _part(whole: Any, index: Any) -> Any:
    sizes = whole.shape().sizes[1:]
    return whole.dynamic_slice(_start(whole, index), (1, *sizes)).reshape(tuple(sizes))


def _put(whole: Any, part: Any, index: Any) -> Any:
    return whole.dynamic_update_slice(_with_leading(part), _start(whole, index))
