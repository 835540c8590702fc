"""Lets `torch_xla.experimental.scan` (and `scan_layers`, which uses it) run in eager mode.

It traces its function into a graph that it takes apart again. In eager mode there is no such graph, and torch_xla 2.9
ends the process with a segmentation fault.
"""

from __future__ import annotations

from typing import Any

import torch_xla
from torch_xla.experimental import scan as _scan

_C = torch_xla._XLAC
_stock = _scan._scan_impl_flat


def run_scans_in_eager_mode() -> None:
    """From now on each scan in eager mode is a graph of its own, also if torch_xla's own function switched it on."""
    _scan._scan_impl_flat = _as_a_graph


def _as_a_graph(*args: Any, **kwargs: Any) -> Any:
    if not _C._get_use_eager_mode():
        return _stock(*args, **kwargs)
    _C._set_use_eager_mode(False)
    try:
        results = _stock(*args, **kwargs)
        # In eager mode nothing is pending.
        torch_xla.sync()
    finally:
        _C._set_use_eager_mode(True)
    return results
