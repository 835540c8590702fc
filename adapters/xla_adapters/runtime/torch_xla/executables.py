"""`XLAExecutables`: torch_xla's executables, of graphs as they were traced or as an extension rewrote them."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cached_property

import torch
import torch_xla
import torch_xla.core.xla_model as xm

from xla_adapters.runtime.extensions import Rewritten, extensions
from xla_adapters.runtime.graphs import GraphInput
from xla_adapters.runtime.interface import Counters, Device, Tracing
from xla_adapters.runtime.torch_xla.bounded import make_room
from xla_adapters.runtime.torch_xla.cached_graphs import CachedGraphs

_C = torch_xla._XLAC
# How torch_xla moves its random stream on at the end of a step (`DeviceContextArena::MarkStep`).
_SEED_FACTOR, _SEED_SHIFT, _SEED_MASK = 7012063, 1012031, (1 << 64) - 1
# Rewritten graphs that are kept, for the case that their executable was forgotten; others are rewritten again.
_REWRITTEN_KEPT = 64


class XLAExecutables:
    """`Executables` on torch_xla's cache of compiled graphs.

    An extension may rewrite a graph before it is compiled. Its executable has the name of the graph that was traced.

    Args:
        device: of the executables.
        tracing: to trace calls of rewritten graphs.
        counters: tell how many executables torch_xla keeps.
        graphs: compiles and runs graphs as they are.
    """

    def __init__(self, device: Device, tracing: Tracing, counters: Counters, graphs: CachedGraphs) -> None:
        self._device = device
        self._tracing = tracing
        self._counters = counters
        self._graphs = graphs
        self._run_graph = graphs.run
        # By the name of a graph: what was made of it, or None if there was nothing to gain.
        self._rewritten: dict[bytes, Rewritten | None] = {}
        # And the executable of that one, and which of the graph's inputs it reads, in its order.
        self._calls: dict[bytes, tuple[bytes, list[int]]] = {}

    @cached_property
    def _device_name(self) -> str:
        return str(self._device.torch_device())

    def inputs(self, outputs: Sequence[torch.Tensor]) -> list[GraphInput]:
        """See `Executables`."""
        return self._graphs.inputs(outputs)

    def text(self, outputs: Sequence[torch.Tensor]) -> bytes:
        """See `Executables`."""
        return self._graphs.text(outputs)

    def name(self, outputs: Sequence[torch.Tensor], donated: Sequence[torch.Tensor]) -> bytes:
        """See `Executables`."""
        return self._graphs.name(outputs, donated)

    def compile(self, outputs: Sequence[torch.Tensor], donated: Sequence[torch.Tensor]) -> bytes:
        """See `Executables`; a rewritten graph that cannot be compiled is compiled as it was, with a warning."""
        if not any(extension.rewrites(self._device) for extension in extensions()):
            return self._graphs.compile(outputs, donated)
        name = self.name(outputs, donated)
        self._calls.pop(name, None)
        if name not in self._rewritten:
            make_room(self._rewritten, _REWRITTEN_KEPT)
            self._rewritten[name] = self._rewrite(self.text(outputs))
        rewritten = self._rewritten[name]
        if rewritten is not None:
            try:
                # Also if it was compiled before: torch_xla may have forgotten it.
                feed = [item.value for item in self.inputs(outputs)]
                call = self._compile_computation(rewritten.graph, feed, donated)
            except (RuntimeError, ValueError) as error:
                self._rewritten[name] = None
                warnings.warn(
                    f"a graph that was {rewritten.how} could not be compiled ({error}); it is compiled as a "
                    "whole, which takes longer",
                    UserWarning,
                    stacklevel=2,
                )
            else:
                make_room(self._calls, self._counters.executables_kept())
                self._calls[name] = call
                return name
        return self._graphs.compile(outputs, donated)

    def run(
        self, name: bytes, inputs: Sequence[torch.Tensor], *, taken: Sequence[torch.Tensor] = ()
    ) -> list[torch.Tensor]:
        """See `Executables`."""
        if name in self._calls:
            name, order = self._calls[name]
            inputs = [inputs[index] for index in order]
        return self._run_graph(name, inputs, taken=taken)

    def finish_run(self) -> None:
        """See `Executables`."""
        seed = _C._xla_get_rng_seed()
        _C._xla_set_rng_seed((_SEED_SHIFT + seed * _SEED_FACTOR) & _SEED_MASK, self._device_name)
        if xm.is_master_ordinal():
            xm.ms.save_metrics()
        xm._run_step_closures()

    def _compile_computation(
        self, graph: bytes, feed: Sequence[torch.Tensor], donated: Sequence[torch.Tensor]
    ) -> tuple[bytes, list[int]]:
        computation = _C._xla_op_computation_from_module_proto("step", graph)
        # What an execution under way computes has another handle once it has ended.
        self._device.wait()
        eager = self._tracing.eager()
        # Or each output would be executed by itself.
        self._tracing.set_eager(False)
        try:
            called = list(_C._xla_user_computation("xla_adapters::call", list(feed), computation))
            where = {handle: index for index, handle in enumerate(_C._get_tensors_handle(list(feed)))}
            read = [item.handle for item in self.inputs(called)]
            if not where.keys() >= set(read):
                raise RuntimeError("it reads something that the graph does not")
            return self._graphs.compile(called, donated), [where[handle] for handle in read]
        finally:
            self._tracing.set_eager(eager)

    def _rewrite(self, graph: bytes) -> Rewritten | None:
        found = (extension.rewrite(graph) for extension in extensions() if extension.rewrites(self._device))
        return next((rewritten for rewritten in found if rewritten is not None), None)
