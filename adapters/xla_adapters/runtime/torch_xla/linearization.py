"""`torch.func.linearize` of functions on the device.

torch traces the tangents of the function with placeholders. An XLA tensor that becomes a tangent is another tensor to
that trace, so the graph it finds does not depend on the placeholders (torch_xla 2.9: it returns zeros).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch._functorch import eager_transforms
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves

_Tangents = Sequence[torch.Tensor]
_disallow: Callable[..., Any] = eager_transforms.lazy_dynamo_disallow


def linearize_without_trace() -> None:
    """From now on `torch.func.linearize` calls the function at each use where it is on the device, as `jvp` does."""
    eager_transforms.lazy_dynamo_disallow = _disallow_or_replace


def _disallow_or_replace(function: Callable[..., Any]) -> Callable[..., Any]:
    """In place of the function of this name, through which `linearize` calls the tracer."""
    allowed: Callable[..., Any] = _disallow(function)
    return partial(_traced, allowed) if function is make_fx else allowed


def _traced(tracer: Callable[..., Any], tangents_of: Callable[[_Tangents], Any]) -> Callable[[_Tangents], Any]:
    def trace(tangents: _Tangents) -> Any:
        if all(tangent.device.type != "xla" for tangent in tangents):
            return tracer(tangents_of)(tangents)
        return _as_graph(lambda *given: tree_leaves(tangents_of(given)), len(tangents))

    return trace


def _as_graph(function: Callable[..., Any], arguments: int) -> torch.fx.GraphModule:
    graph = torch.fx.Graph()
    graph.output(graph.call_function(function, tuple(graph.placeholder(f"t{n}") for n in range(arguments))))
    return torch.fx.GraphModule({}, graph)
