"""`ScopeReport`: what the end of a step compiled."""

from __future__ import annotations

from dataclasses import dataclass

from xla_adapters.runtime import CompiledMemory, Runtime
from xla_adapters.tracing.graph_analysis import GraphAnalysis
from xla_adapters.tracing.operation_log import OperationLog


@dataclass(frozen=True, kw_only=True)
class ScopeReport:
    """How a step ended.

    Attributes:
        compiles: how many graphs were compiled, or loaded from the compile cache.
        loads: how many of them were loaded.
        compile_seconds: how many seconds that took.
        operations: what the step did.
        graph: the graph that was executed; None if it is not known.
        memory: what the largest of the graphs needs; None if nothing was compiled, or the runtime does not tell.
    """

    compiles: int
    compile_seconds: float
    operations: OperationLog
    graph: GraphAnalysis | None = None
    memory: CompiledMemory | None = None
    loads: int = 0


NOTHING_COMPILED = ScopeReport(compiles=0, compile_seconds=0.0, operations=OperationLog())


class CompileMeter:
    """Counts what is compiled from now on.

    Args:
        runtime: the runtime.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._compiles, self._seconds = runtime.counters.compile_totals()
        self._loaded = runtime.counters.compile_cache().loaded
        # Of what was compiled before.
        runtime.counters.compiled_memory()

    def report(self, operations: OperationLog, graph: GraphAnalysis | None = None) -> ScopeReport:
        """What was compiled, for a step that did these operations."""
        counters = self._runtime.counters
        compiles, seconds = counters.compile_totals()
        return ScopeReport(
            compiles=compiles - self._compiles,
            compile_seconds=seconds - self._seconds,
            operations=operations,
            graph=graph,
            loads=min(counters.compile_cache().loaded - self._loaded, compiles - self._compiles),
            memory=max(counters.compiled_memory(), key=lambda memory: memory.total, default=None),
        )
