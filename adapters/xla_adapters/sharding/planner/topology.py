"""`Topology`: what the devices and the links between them can do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from xla_adapters.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Topology:
    """What a device computes, holds and sends; all figures are of one device.

    Args:
        name: for messages.
        flops: matrix products, operations per second.
        memory_bandwidth: bytes per second between the device and its own memory; everything but matrix products is
            taken to be bound by it.
        memory_bytes: of the device.
        bandwidth: bytes per second that a device sends around a ring of one mesh axis.
        latency: seconds for one hop on the ring.
        axis_bandwidth: where an axis differs, e.g. `{"data": 3e9}` for a data axis that crosses hosts.
        axis_latency: likewise.
        reduce_scatter: the compiler emits reduce-scatter; XLA's CPU backend emits an all-reduce and takes a slice.
        merges_sums: several partial gradients of one value are added before they are reduced, once; XLA's CPU backend
            reduces each.
        gathers_again: a parameter that is stored split is gathered for the forward pass and again for the backward
            pass, as it must be to save memory; XLA's CPU backend keeps what it gathered.

    Raises:
        ConfigError: a figure is not positive.
    """

    name: str
    flops: float
    memory_bandwidth: float
    memory_bytes: float
    bandwidth: float
    latency: float = 1e-6
    axis_bandwidth: Mapping[str, float] = field(default_factory=dict)
    axis_latency: Mapping[str, float] = field(default_factory=dict)
    reduce_scatter: bool = True
    merges_sums: bool = True
    gathers_again: bool = True

    def __post_init__(self) -> None:
        figures = {
            "flops": self.flops,
            "memory_bandwidth": self.memory_bandwidth,
            "memory_bytes": self.memory_bytes,
            "bandwidth": self.bandwidth,
            **{f"axis_bandwidth[{axis!r}]": value for axis, value in self.axis_bandwidth.items()},
        }
        for name, value in figures.items():
            if not value > 0:
                raise ConfigError(f"{name}={value!r} of the topology {self.name!r} must be a positive number")

    def bandwidth_of(self, axis: str) -> float:
        """Bytes per second around a ring of this axis."""
        return self.axis_bandwidth.get(axis, self.bandwidth)

    def latency_of(self, axis: str) -> float:
        """Seconds for one hop on a ring of this axis."""
        return self.axis_latency.get(axis, self.latency)

    @classmethod
    def preset(cls, name: str) -> Topology:
        """A known kind of device: `"cpu"`, `"v4"`, `"v5e"`, `"v5p"` or `"v6e"`.

        FLOP/s (bf16), memory and memory bandwidth are those Google publishes (cloud.google.com/tpu/docs, "System
        architecture", a page per generation). Bandwidth is both directions of one link of the torus, as "How to Scale
        Your Model" gives them (jax-ml.github.io/scaling-book/tpus): an approximation, because which links a mesh axis
        gets is decided when the slice is laid out. The latency of a hop is an approximation too. `"cpu"` is a
        processor with 10 Gbit/s between each and the next: orders of magnitude, not measurements.

        Raises:
            ConfigError: there is no such preset.
        """
        if name not in _PRESETS:
            raise ConfigError(f"no topology is named {name!r}; known: {', '.join(map(repr, _PRESETS))}")
        return _PRESETS[name]


_GIB = 1024.0**3
_PRESETS = {
    item.name: item
    for item in (
        Topology(
            name="cpu",
            flops=2e11,
            memory_bandwidth=4e10,
            memory_bytes=4 * _GIB,
            bandwidth=1e9,
            latency=2e-6,
            reduce_scatter=False,
            merges_sums=False,
            gathers_again=False,
        ),
        Topology(name="v4", flops=275e12, memory_bandwidth=1.2e12, memory_bytes=32 * _GIB, bandwidth=9e10),
        Topology(name="v5e", flops=197e12, memory_bandwidth=8.19e11, memory_bytes=16 * _GIB, bandwidth=9e10),
        Topology(name="v5p", flops=459e12, memory_bandwidth=2.765e12, memory_bytes=95 * _GIB, bandwidth=1.8e11),
        Topology(name="v6e", flops=918e12, memory_bandwidth=1.64e12, memory_bytes=32 * _GIB, bandwidth=1.8e11),
    )
}
