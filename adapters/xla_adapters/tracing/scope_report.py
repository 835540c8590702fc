"""`ScopeReport`: what the end of a step compiled."""

from __future__ import annotations

from dataclasses import dataclass

from xla_adapters.tracing.operation_log import OperationLog


@dataclass(frozen=True, kw_only=True)
class ScopeReport:
    """How many graphs were compiled when a step ended, how many seconds that took, and what the step did."""

    compiles: int
    compile_seconds: float
    operations: OperationLog


NOTHING_COMPILED = ScopeReport(compiles=0, compile_seconds=0.0, operations=OperationLog())
