"""`check_graph_limit`: counts the different graphs of a step, for `max_graphs`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from xla_adapters.errors import GraphLimitError
from xla_adapters.runtime import Runtime
from xla_adapters.tracing.undo_log import UndoLog


def check_graph_limit(
    name: str,
    limit: int,
    graphs: set[str],
    outputs: Sequence[torch.Tensor],
    runtime: Runtime,
    reason: Callable[[], str],
) -> None:
    """Adds the pending graph to those seen, unless it would be one too many.

    torch_xla's own `max_different_graphs` compares traces, not graphs. There the first update of the weights alone
    counts as another one.

    Args:
        name: the step's, for the message.
        limit: how many different graphs are allowed.
        graphs: those seen so far; the new one is added.
        outputs: what the pending graph computes.
        runtime: the runtime.
        reason: says why there is another graph.

    Raises:
        GraphLimitError: it would be graph number `limit + 1`.
    """
    graph = runtime.tracing.graph_hash(outputs)
    if graph in graphs:
        return
    if len(graphs) >= limit:
        raise GraphLimitError(
            f"the step {name!r} was about to compile graph number {len(graphs) + 1}, and max_graphs={limit}: "
            f"{reason()}\n  or raise max_graphs. The step was discarded; parameters are as before it."
        )
    graphs.add(graph)


def check_pending_graph(
    name: str, limit: int, graphs: set[str], undo_log: UndoLog, runtime: Runtime, reason: Callable[[], str]
) -> None:
    """`check_graph_limit` for the pending graph at the end of a step.

    Args:
        name: the step's, for the message.
        limit: how many different graphs are allowed.
        graphs: those seen so far; a new one is added.
        undo_log: the step's.
        runtime: the runtime.
        reason: says why there is another graph.

    Raises:
        GraphLimitError: it would be graph number `limit + 1`.
    """
    # The graph is identified by the state it changes, or by all pending tensors if it changes none.
    outputs = undo_log.pending_tensors()
    if not outputs:
        with torch._C.DisableTorchFunction():
            outputs = [tensor for tensor in runtime.tracing.live_tensors() if runtime.tracing.is_pending(tensor)]
    # A step that computes nothing (a training step that returns None) has no graph.
    if outputs:
        check_graph_limit(name, limit, graphs, outputs, runtime, reason)
