"""`check_pending_graph`: refuses further graphs of a step, for `max_graphs` and `on_recompile="error"`."""

from __future__ import annotations

from xla_adapters.config import XLAConfig
from xla_adapters.errors import GraphLimitError
from xla_adapters.runtime import Runtime
from xla_adapters.tracing.graph_analysis import pending_outputs
from xla_adapters.tracing.graph_history import GraphHistory, StepSignature
from xla_adapters.tracing.operation_log import OperationLog
from xla_adapters.tracing.undo_log import UndoLog


def check_pending_graph(
    name: str,
    config: XLAConfig,
    call: tuple[StepSignature, OperationLog],
    history: GraphHistory,
    undo_log: UndoLog,
    runtime: Runtime,
) -> None:
    """Adds the pending graph at the end of a step to those seen, unless it would be one too many; if that is limited.

    torch_xla's own `max_different_graphs` compares traces, not graphs. There the first update of the weights alone
    counts as another one.

    Args:
        name: the step's, for the message.
        config: with `max_graphs` and `on_recompile`.
        call: what is known of the call from outside, and what it did.
        history: the step's graphs; a new one is added.
        undo_log: the step's.
        runtime: the runtime.

    Raises:
        GraphLimitError: it would be graph number `max_graphs + 1`, or the second one under `on_recompile="error"`.
    """
    if not config.limits_graphs:
        return
    outputs = pending_outputs(undo_log, runtime)
    # A step that computes nothing (a training step that returns None) has no graph.
    if not outputs:
        return
    check_graph(name, config, call, history, runtime.tracing.graph_hash(outputs))


def check_graph(
    name: str, config: XLAConfig, call: tuple[StepSignature, OperationLog], history: GraphHistory, graph: str
) -> None:
    """As `check_pending_graph`, of a graph whose hash is known."""
    if not config.limits_graphs or graph in history.hashes:
        return
    number = len(history.hashes) + 1
    limit = ""
    if config.max_graphs is not None and number > config.max_graphs:
        limit, way_out = f"max_graphs={config.max_graphs}", "raise max_graphs"
    elif config.on_recompile == "error" and history.has_graph_of(call[0].phase):
        limit, way_out = "on_recompile='error'", "choose on_recompile='warn'"
    if limit:
        raise GraphLimitError(
            f"the step {name!r} was about to compile graph number {number}, and {limit}: {history.reason(*call)}\n"
            f"  or {way_out}. The step was discarded; parameters are as before it."
        )
    history.hashes.add(graph)
