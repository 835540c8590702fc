"""The part of the seam that makes one executable of several runs of a graph.

Written against torch_xla 2.9's `xla_builder` and user computations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch_xla
import torch_xla.core.xla_builder as xb

if TYPE_CHECKING:
    from xla_adapters.backend.interface import Backend as _Rest
else:
    _Rest = object

_C = torch_xla._XLAC
# The position of an input or output of one run, and the run; or None for what is not of one run.
_Key = tuple[int, "int | None"]


@dataclass(frozen=True)
class RepeatedGraph:
    """An executable that runs a graph several times, one after another.

    Attributes:
        name: of the executable.
        order: for each of its inputs the position among the graph's own, and the run; None if the first run begins
            with it, or all read it.
        results: for each of its outputs the position among the graph's own, and the run; None if it is what the runs
            carried on.
    """

    name: bytes
    order: tuple[_Key, ...]
    results: tuple[_Key, ...]


class RepeatedGraphs(_Rest):
    """Several runs of a graph in one call; a part of `PJRTBackend`, on whose rest it relies."""

    def graph_text(self, outputs: Sequence[torch.Tensor]) -> bytes:
        """The pending graph of these tensors, as `compile_repeated` takes it."""
        return bytes(_C._get_xla_tensors_hlo_proto(list(outputs)))

    def compile_repeated(
        self,
        graph: bytes,
        inputs: Sequence[torch.Tensor],
        *,
        varying: Sequence[int],
        carried: Mapping[int, int],
        each: Sequence[int],
        donated: Sequence[int],
        runs: int,
        rolled: bool,
    ) -> RepeatedGraph:
        """Compiles several runs of a graph as one executable, without executing it; nothing may be pending.

        Args:
            graph: as `graph_text` gives it.
            inputs: of one run, in the order of its parameters.
            varying: positions of inputs that each run has its own of.
            carried: for each input that the next run takes from this one, the position of the output.
            each: outputs that are wanted of each run.
            donated: positions of inputs whose buffers the executable may reuse.
            runs: how many.
            rolled: as a loop, whose compile takes about as long as that of one run; else one behind the other.
        """
        shared = [index for index in range(len(inputs)) if index not in set(varying)]
        given: list[_Key] = [(index, None) for index in shared]
        given += [(index, run) for index in varying for run in range(runs)]
        feed = [inputs[index] if run is None else self._stand_in(inputs[index]) for index, run in given]
        body = _C._xla_op_computation_from_module_proto("step", graph)
        builder = xb.create_builder("steps")
        params = {
            key: xb.mkparam(builder, number, xb.tensor_shape(tensor))
            for number, (key, tensor) in enumerate(zip(given, feed, strict=True))
        }
        one_run = _Run(body, len(inputs), list(varying), dict(carried), list(each))
        outputs = (one_run.rolled if rolled else one_run.unrolled)(params, runs)
        computation = xb.Op.tuple(list(outputs.values())).build("steps")
        eager = self.eager()
        # Or each output would be executed by itself.
        self.set_eager(False)
        try:
            tensors = list(_C._xla_user_computation("xla_adapters::steps", feed, computation))
            # What an execution under way computes has another handle once it has ended.
            self.wait()
            where = dict(zip(self.handles(feed), given, strict=True))
            name = self.compile_graph(tensors, [inputs[index] for index in donated])
            order = tuple(where[item.handle] for item in self.graph_inputs(tensors))
            _C._clear_pending_irs(str(self.device()))
        finally:
            self.set_eager(eager)
        return RepeatedGraph(name, order, tuple(outputs))

    def _stand_in(self, tensor: torch.Tensor) -> torch.Tensor:
        host = torch.empty(tensor.shape, dtype=tensor.dtype)
        stand_in: torch.Tensor = _C._xla_tensors_from_aten([host], [str(self.device())], None)[0]
        return stand_in


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

    def _last(self, state: Mapping[int, Any]) -> dict[_Key, Any]:
        return {(output, None): state[index] for index, output in self._carried.items()}

    def unrolled(self, params: Mapping[_Key, Any], runs: int) -> dict[_Key, Any]:
        """One run behind the other."""
        state = {index: params[index, None] for index in self._shared}
        results: dict[_Key, Any] = {}
        for run in range(runs):
            outputs = self._call({**state, **{index: params[index, run] for index in self._varying}})
            state.update({index: outputs[output] for index, output in self._carried.items()})
            results.update({(output, run): outputs[output] for output in self._each})
        return {**self._last(state), **results}

    def rolled(self, params: Mapping[_Key, Any], runs: int) -> dict[_Key, Any]:
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
