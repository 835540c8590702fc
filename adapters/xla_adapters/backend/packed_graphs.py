"""The part of the seam that compiles steps whose optimizers have their state in few rows of numbers.

Written against torch_xla 2.9's user computations.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from xla_adapters.backend.block_graphs import BlockGraphs, make_room
from xla_adapters.hlo_graph.graph import NotUnderstood
from xla_adapters.packing import Owner, PackedModule, packed

logger = logging.getLogger("xla_adapters")

_Wanted: TypeAlias = tuple[list[Owner], list[int]]
# Graphs that are kept, for the case that their executable was forgotten.
_KEPT = 64


@dataclass(frozen=True)
class PackedGraph:
    """An executable of a `PackedModule`.

    Attributes:
        name: of the executable.
        order: for each of its inputs the position among the module's.
    """

    name: bytes
    order: tuple[int, ...]


class PackedGraphs(BlockGraphs):
    """Steps whose optimizers' state is packed; a part of `PJRTBackend`."""

    def __init__(self) -> None:
        super().__init__()
        # By the name of a graph, what it was looked for, and what was found: None if there is nothing to pack.
        self._packed: dict[bytes, tuple[_Wanted, PackedModule | None]] = {}

    def packed_module(
        self, name: bytes, outputs: Sequence[torch.Tensor], owners: Sequence[Owner], gradients: Sequence[int]
    ) -> PackedModule | None:
        """The pending graph with its optimizers' state in rows; None if that is not worth while, or not for the device.

        Only for CPU devices, where it was measured: on others what a kernel costs to compile is not known.

        Args:
            name: of the graph's executable.
            outputs: of the graph.
            owners: the optimizers, by positions of the graph's inputs and outputs.
            gradients: positions of outputs that may be in rows, too.
        """
        if self.is_spmd() or self.hardware() != "CPU":
            return None
        wanted = list(owners), list(gradients)
        if name not in self._packed or self._packed[name][0] != wanted:
            make_room(self._packed, _KEPT)
            self._packed[name] = wanted, self._find(outputs, *wanted)
        return self._packed[name][1]

    def _find(
        self, outputs: Sequence[torch.Tensor], owners: Sequence[Owner], gradients: Sequence[int]
    ) -> PackedModule | None:
        try:
            module = packed(self.graph_text(outputs), owners, gradients)
        except NotUnderstood as reason:
            logger.info("an optimizer's state is not packed: %s", reason)
            return None
        if module is not None:
            logger.info("%s", module)
        return module

    def compile_packed(
        self, name: bytes, module: PackedModule, feed: Sequence[torch.Tensor], donated: Sequence[int]
    ) -> PackedGraph | None:
        """Compiles such a graph, without executing it; None, and a warning, if that fails.

        Args:
            name: as of `packed_module`.
            module: what that returned.
            feed: the inputs of the module.
            donated: positions of those whose buffers the executable may reuse.
        """
        try:
            executable, order = self._compile_call(
                self._computation(module.module), feed, [feed[position] for position in donated]
            )
        except (RuntimeError, ValueError) as error:
            self._packed[name] = self._packed[name][0], None
            warnings.warn(
                f"a step whose optimizer's state was packed could not be compiled ({error}); it is compiled as it "
                "is, and its replays take longer on the host",
                UserWarning,
                stacklevel=2,
            )
            return None
        return PackedGraph(executable, tuple(order))
