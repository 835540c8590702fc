"""Functions of torch and torch_xla 2.9 that are replaced as the runtime starts, since they fail on the device.

- `torch_xla.experimental.scan` (and `scan_layers`, which uses it) traces its function into a graph that it takes apart
  again. In eager mode there is no such graph, and the process ends with a segmentation fault.
- `torch.func.linearize` traces the tangents of a function with placeholders. An XLA tensor that becomes a tangent is
  another tensor to that trace, so the graph it finds does not depend on the placeholders: it returns zeros.
- Lightning asks torch_xla for the number of TPUs when a Trainer is made. torch_xla multiplies the chips with the cores
  of each, and looks up the cores also where there is no chip: it asks a metadata server, or raises TypeError in a
  process that has imported jax (which sets `TPU_SKIP_MDS_QUERY`).

Replaced as it is imported: how it warns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr
from torch._functorch import eager_transforms
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves
from torch_xla._internal import tpu as _tpu
from torch_xla.experimental import scan as _scan

_C = torch_xla._XLAC
_Tensors = Sequence[torch.Tensor]
_Tangents = Sequence[torch.Tensor]
_stock_scan = _scan._scan_impl_flat
_stock_count = _tpu.num_available_devices
_disallow: Callable[..., Any] = eager_transforms.lazy_dynamo_disallow


# ---- scans ----------------------------------------------------------------------------------------


def run_scans_in_eager_mode() -> None:
    """From now on each scan in eager mode is a graph of its own, also if torch_xla's own function switched it on."""
    _scan._scan_impl_flat = _as_a_graph


def _as_a_graph(*args: Any, **kwargs: Any) -> Any:
    if not computes_at_once():
        return _stock_scan(*args, **kwargs)
    _C._set_use_eager_mode(False)
    try:
        results = _stock_scan(*args, **kwargs)
        # In eager mode nothing is pending.
        torch_xla.sync()
    finally:
        _C._set_use_eager_mode(True)
    return results


def computes_at_once() -> bool:
    """Whether operators are executed one by one, so that values may be read."""
    return bool(_C._get_use_eager_mode())


def loop(
    function: Callable[[_Tensors, _Tensors], tuple[list[torch.Tensor], list[torch.Tensor]]],
    start: _Tensors,
    given: _Tensors,
) -> list[torch.Tensor]:
    """A loop in the graph, without gradients: what `torch_xla.experimental.scan` makes of the forward.

    Args:
        function: called once, with the state and the slices of `given`; returns the next state, and results.
        start: the first state.
        given: one slice along the first dimension for each time.

    Returns:
        The results of all times, stacked.
    """
    results: list[torch.Tensor] = _scan._scan_impl_flat(function, start, given)[1]
    return results


# ---- torch.func.linearize -------------------------------------------------------------------------


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


# ---- the number of TPUs ---------------------------------------------------------------------------


def count_tpus_without_asking() -> None:
    """From now on hosts without a TPU have none, and nobody is asked."""
    _tpu.num_available_devices = _count


def _count() -> int:
    return _stock_count() if _tpu.num_available_chips() else 0


# ---- warnings -------------------------------------------------------------------------------------


def warn_by_its_logger() -> None:
    """From now on torch_xla logs by its own logger, and does not warn that accelerate and transformers call it.

    The functions of the module `logging` give the root logger a handler if it has none. The two functions are
    deprecated, in the last release of torch_xla; who trains cannot change that the libraries call them.
    """
    xm.logging = xr.logging = torch_xla.logger
    for name in ("xla_device", "mark_step"):
        function = getattr(xm, name)
        setattr(xm, name, getattr(function, "__wrapped__", function))
