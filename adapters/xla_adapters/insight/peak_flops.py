"""`peak_flops`: what the devices could compute, to say which part of it a training uses."""

from __future__ import annotations

from xla_adapters.runtime import get_runtime
from xla_adapters.sharding.planner import Topology

# What PJRT calls the kinds of TPU, and what the planner calls them.
_TOPOLOGIES = {
    "TPU v4": "v4",
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v5": "v5p",
    "TPU v5p": "v5p",
    "TPU v6 lite": "v6e",
    "TPU v6e": "v6e",
    "TPU7x": "tpu7x",
}


def peak_flops() -> float | None:
    """The bf16 FLOPs per second of all devices that work on a step together; None for devices that are not known."""
    device = get_runtime().device
    name = _TOPOLOGIES.get(device.kind())
    return None if name is None else Topology.preset(name).flops * (device.count() if device.is_spmd() else 1)
