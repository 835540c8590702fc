"""How many TPUs a host has, where it has none.

Lightning asks torch_xla for that when a Trainer is made. torch_xla 2.9 multiplies the chips with the cores of each, and
looks up the cores also where there is no chip: it asks a metadata server, or raises TypeError in a process that has
imported jax (which sets `TPU_SKIP_MDS_QUERY`).
"""

from __future__ import annotations

from torch_xla._internal import tpu as _tpu

_stock = _tpu.num_available_devices


def count_tpus_without_asking() -> None:
    """From now on hosts without a TPU have none, and nobody is asked."""
    _tpu.num_available_devices = _count


def _count() -> int:
    return _stock() if _tpu.num_available_chips() else 0
