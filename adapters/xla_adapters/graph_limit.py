"""Counts the different graphs of a step, for `max_graphs`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from xla_adapters.backend import Backend
from xla_adapters.errors import GraphLimitError
from xla_adapters.rollback import StepJournal

# Steps made anew at each pass (`with step():`) are told apart by their names.
_graphs_by_name: dict[str, set[str]] = {}


def graphs_of(name: str) -> set[str]:
    """The graphs seen so far of steps of this name."""
    return _graphs_by_name.setdefault(name, set())


def check_graph_limit(
    name: str, limit: int, graphs: set[str], outputs: Sequence[torch.Tensor], backend: Backend
) -> None:
    """Adds the pending graph to those seen, unless it would be one too many.

    torch_xla's own `max_different_graphs` compares traces and not graphs: the weights' first update
    alone is another trace to it.

    Args:
        name: the step's, for the message.
        limit: how many different graphs are allowed.
        graphs: those seen so far; the new one is added.
        outputs: what the pending graph computes.
        backend: the seam.

    Raises:
        GraphLimitError: it would be graph number `limit + 1`.
    """
    graph = backend.graph_hash(outputs)
    if graph in graphs:
        return
    if len(graphs) >= limit:
        raise GraphLimitError(
            f"the step {name!r} was about to compile graph number {len(graphs) + 1}, and max_graphs={limit}. Each new "
            "combination of shapes, dtypes and Python values in the step is a graph of its own: pad batches to a fixed "
            "length, drop the partial last batch, or raise max_graphs. The step was discarded; parameters are as "
            "before it."
        )
    graphs.add(graph)


def check_pending_graph(name: str, limit: int, graphs: set[str], journal: StepJournal, backend: Backend) -> None:
    """`check_graph_limit` for what a step has pending at its end.

    Args:
        name: the step's, for the message.
        limit: how many different graphs are allowed.
        graphs: those seen so far; a new one is added.
        journal: of the step.
        backend: the seam.

    Raises:
        GraphLimitError: it would be graph number `limit + 1`.
    """
    # What the step changed names its graph; a step that changes nothing is named by all it made.
    outputs = journal.pending_tensors()
    if not outputs:
        with torch._C.DisableTorchFunction():
            outputs = [tensor for tensor in backend.live_tensors() if backend.is_pending(tensor)]
    # A step that does nothing (a training step that returns None, say) is no graph.
    if outputs:
        check_graph_limit(name, limit, graphs, outputs, backend)
