"""`GraphAnalysis`: what the graph of a step reads, returns and computes."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import torch

from xla_adapters.hlo.cost import cost_of
from xla_adapters.runtime import Runtime
from xla_adapters.tracing.operation_log import OperationLog
from xla_adapters.tracing.recompile_causes import common_length
from xla_adapters.tracing.undo_log import UndoLog
from xla_adapters.utils import in_bytes


@dataclass(frozen=True, kw_only=True)
class GraphAnalysis:
    """What a graph needs, read from its HLO before XLA compiles it.

    Of the memory only what enters and leaves is in it; for what XLA needs in between see `CompileEvent.memory`.

    Attributes:
        hash: of the graph, in hexadecimal digits.
        operations: HLO instructions.
        inputs, outputs: how many arrays it reads and returns.
        input_bytes, output_bytes: how large they are.
        parameters, parameter_bytes: the inputs that are parameters which the step trains.
        donated, donated_bytes: the inputs whose memory the outputs reuse; None if torch_xla chooses them.
        flops: of matrix products and convolutions; None if some are in a loop.
    """

    hash: str
    operations: int
    inputs: int
    input_bytes: int
    outputs: int
    output_bytes: int
    parameters: int
    parameter_bytes: int
    donated: int | None = None
    donated_bytes: int | None = None
    flops: int | None = None

    def __str__(self) -> str:
        parts = [
            f"{self.inputs} inputs of {in_bytes(self.input_bytes)} ({self.parameters} of them parameters)",
            f"{self.outputs} outputs of {in_bytes(self.output_bytes)}",
            f"{self.operations} operations",
        ]
        if self.donated is not None:
            parts.append(f"{self.donated} donated of {in_bytes(self.donated_bytes or 0)}")
        parts.append("FLOPs unknown" if self.flops is None else f"{self.flops:,} FLOPs")
        return f"graph {self.hash}: {', '.join(parts)}"


@dataclass
class GraphAnalyses:
    """The graphs of one step that were looked at. A graph that is known is not lowered again.

    Attributes:
        known: by hash.
    """

    known: dict[str, GraphAnalysis] = field(default_factory=dict)
    _stateless: dict[Hashable, GraphAnalysis | None] = field(default_factory=dict)
    # The last call whose graph was looked at: from outside, and what it did.
    _last: tuple[Hashable, OperationLog, GraphAnalysis] | None = None

    def executable(
        self,
        name: bytes,
        outputs: Sequence[torch.Tensor],
        donated: Sequence[torch.Tensor],
        undo_log: UndoLog,
        runtime: Runtime,
    ) -> GraphAnalysis:
        """Of the pending graph of an executable.

        Args:
            name: of the executable.
            outputs: its pending outputs.
            donated: the inputs whose memory it may reuse.
            undo_log: the step's.
            runtime: the runtime.
        """
        graph = name.hex()
        if graph not in self.known:
            self.known[graph] = _analyse(graph, outputs, undo_log, runtime, donated)
        return self.known[graph]

    def expected(self, key: Hashable, operations: OperationLog) -> GraphAnalysis | None:
        """The graph of a call that does the same as the last one that was looked at; None if it does not.

        If the sync compiles all the same, it is another graph. A look at the pending graph costs a twentieth of a step.
        """
        if self._last is None or self._last[0] != key:
            return None
        _, before, graph = self._last
        length = len(operations.entries)
        return graph if len(before.entries) == length == common_length(before, operations) else None

    def sync(
        self, key: Hashable, operations: OperationLog, undo_log: UndoLog, runtime: Runtime
    ) -> GraphAnalysis | None:
        """Of the pending graph that a sync is going to execute; None if nothing is pending.

        Args:
            key: what is known of the call from outside. A step that changes no state is looked at once for each key,
                because its outputs must be searched among all tensors of the process.
            operations: what the call did.
            undo_log: the step's.
            runtime: the runtime.
        """
        found = self._pending(key, undo_log, runtime)
        self._last = None if found is None or operations.was_split else (key, operations, found)
        return found

    def _pending(self, key: Hashable, undo_log: UndoLog, runtime: Runtime) -> GraphAnalysis | None:
        if outputs := undo_log.pending_tensors():
            graph = runtime.tracing.graph_hash(outputs)
            if graph not in self.known:
                self.known[graph] = _analyse(graph, outputs, undo_log, runtime)
            return self.known[graph]
        if key not in self._stateless:
            outputs = pending_outputs(undo_log, runtime)
            graph = runtime.tracing.graph_hash(outputs) if outputs else ""
            self._stateless[key] = _analyse(graph, outputs, undo_log, runtime) if outputs else None
        return self._stateless[key]


def pending_outputs(undo_log: UndoLog, runtime: Runtime) -> list[torch.Tensor]:
    """What identifies the graph: the state that it changes, or all pending tensors if it changes none."""
    if outputs := undo_log.pending_tensors():
        return outputs
    with torch._C.DisableTorchFunction():
        return [tensor for tensor in runtime.tracing.live_tensors() if runtime.tracing.is_pending(tensor)]


def _analyse(
    graph: str,
    outputs: Sequence[torch.Tensor],
    undo_log: UndoLog,
    runtime: Runtime,
    donated: Sequence[torch.Tensor] | None = None,
) -> GraphAnalysis:
    """Lowers a pending graph to HLO; compiles and executes nothing."""
    cost = cost_of(runtime.executables.text(outputs))
    parameters = [entry.before_step for entry in undo_log.entries() if isinstance(entry.tensor, torch.nn.Parameter)]
    return GraphAnalysis(
        hash=graph,
        operations=cost.operations,
        inputs=cost.inputs,
        input_bytes=cost.input_bytes,
        outputs=cost.outputs,
        output_bytes=cost.output_bytes,
        parameters=len(parameters),
        parameter_bytes=sum(map(_size, parameters)),
        donated=None if donated is None else len(donated),
        donated_bytes=None if donated is None else sum(map(_size, donated)),
        flops=cost.flops,
    )


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
