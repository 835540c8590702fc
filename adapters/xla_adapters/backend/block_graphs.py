"""The part of the seam that compiles graphs in blocks: what they repeat becomes computations that are called, or loops.

Written against torch_xla 2.9's user computations.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch_xla
import torch_xla.runtime as xr

from xla_adapters.backend.cached_graphs import CachedGraphs
from xla_adapters.backend.compiler_flags import leave_out_slow_passes, leaves_out_slow_passes
from xla_adapters.backend.interface import FastCompile
from xla_adapters.blocks import NotUnderstood, outline
from xla_adapters.errors import ConfigError, RuntimeOrderError

_C = torch_xla._XLAC

logger = logging.getLogger("xla_adapters")

# Graphs in blocks that are kept, for the case that their executable was forgotten; others are taken apart again.
_KEPT = 64


class BlockGraphs(CachedGraphs):
    """Cached graphs that are compiled in blocks, where that was asked for; a part of `PJRTBackend`.

    Whoever calls an executable does so under the name of the graph that was traced.
    """

    def __init__(self) -> None:
        super().__init__()
        self._finds_blocks = False
        # By the name of a graph: the same one with calls, or None if it has nothing that is repeated.
        self._in_blocks: dict[bytes, Any] = {}
        # And the executable of that one, and which of the graph's inputs it reads, in its order.
        self._calls: dict[bytes, tuple[bytes, list[int]]] = {}

    def _compile_fast(self, how: FastCompile) -> None:
        if how not in (True, "blocks"):
            raise ConfigError(f"initialize(fast_compile={how!r}): there are False, True and 'blocks'")
        if xr.device_type() != "CPU":
            raise ConfigError(
                f"initialize(fast_compile={how!r}) is for CPU devices, and this one is {xr.device_type()}: it "
                "is known to shorten the work of XLA's compiler for the CPU alone; leave it out here"
            )
        if how == "blocks":
            self._finds_blocks = True
            return
        if self.runtime_started() and not leaves_out_slow_passes():
            raise RuntimeOrderError(
                "fast compiles were asked for after the XLA runtime had started, which reads its flags once. Call "
                "xla_adapters.initialize(fast_compile=True) at the start of the program, before a tensor or model is "
                "moved to the XLA device and before transformers.TrainingArguments are created, which start the "
                "runtime."
            )
        leave_out_slow_passes()
        self._finds_blocks = True

    def compile_graph(self, outputs: Sequence[torch.Tensor], donated: Sequence[torch.Tensor]) -> bytes:
        """As in `CachedGraphs`, in blocks if the graph has some."""
        if not self._finds_blocks or self.is_spmd():
            return super().compile_graph(outputs, donated)
        name = self.executable_name(outputs, donated)
        self._calls.pop(name, None)
        if name not in self._in_blocks:
            make_room(self._in_blocks, _KEPT)
            self._in_blocks[name] = _in_blocks(self.graph_text(outputs))
        if self._in_blocks[name] is not None:
            try:
                # Also if it was compiled before: torch_xla may have forgotten it.
                feed = [item.value for item in self.graph_inputs(outputs)]
                call = self._compile_call(self._in_blocks[name], feed, donated)
            except (RuntimeError, ValueError) as error:
                self._in_blocks[name] = None
                warnings.warn(
                    f"a graph that was taken apart into blocks could not be compiled ({error}); it is compiled as a "
                    "whole, which takes longer",
                    UserWarning,
                    stacklevel=2,
                )
            else:
                make_room(self._calls, self.executables_kept())
                self._calls[name] = call
                return name
        return super().compile_graph(outputs, donated)

    def run_graph(
        self, name: bytes, inputs: Sequence[torch.Tensor], *, taken: Sequence[torch.Tensor] = ()
    ) -> list[torch.Tensor]:
        """As in `CachedGraphs`."""
        if name in self._calls:
            name, order = self._calls[name]
            inputs = [inputs[index] for index in order]
        return super().run_graph(name, inputs, taken=taken)

    def _compile_call(
        self, computation: Any, feed: Sequence[torch.Tensor], donated: Sequence[torch.Tensor]
    ) -> tuple[bytes, list[int]]:
        """Compiles a computation of these inputs; returns its name, and which of them it reads, in its order.

        Raises:
            RuntimeError, ValueError: it does not compile, or it reads something else.
        """
        # What an execution under way computes has another handle once it has ended.
        self.wait()
        eager = self.eager()
        # Or each output would be executed by itself.
        self.set_eager(False)
        try:
            called = list(_C._xla_user_computation("xla_adapters::call", list(feed), computation))
            where = {handle: index for index, handle in enumerate(self.handles(feed))}
            read = [item.handle for item in self.graph_inputs(called)]
            if not where.keys() >= set(read):
                raise RuntimeError("it reads something that the graph does not")
            return super().compile_graph(called, donated), [where[handle] for handle in read]
        finally:
            self.set_eager(eager)

    def _computation(self, graph: bytes) -> Any:
        """A graph's text as a computation: in blocks, if that was asked for and the graph has some."""
        outlined = _in_blocks(graph) if self._finds_blocks else None
        return _C._xla_op_computation_from_module_proto("step", graph) if outlined is None else outlined


def make_room(kept: dict[bytes, Any], most: int) -> None:
    """Drops the oldest."""
    while len(kept) >= most:
        del kept[next(iter(kept))]


def _in_blocks(graph: bytes) -> Any:
    """As a computation; None if there is nothing to gain."""
    try:
        outlined = outline(graph)
    except NotUnderstood as reason:
        logger.info("a graph is compiled as a whole: %s", reason)
        return None
    if outlined is None:
        return None
    logger.info("a graph is compiled in blocks: %s", outlined)
    return _C._xla_op_computation_from_module_proto("step", outlined.module)
