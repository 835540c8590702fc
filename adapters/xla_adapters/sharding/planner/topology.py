"""`Topology`: speed and memory of devices, and bandwidth and latency of their links."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from xla_adapters.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Topology:
    """The figures of one device and its links, for the planner's cost model.

    Args:
        name: for messages.
        flops: operations per second in matrix products.
        memory_bandwidth: bytes per second between the device and its memory; limits all other operations.
        memory_bytes: of the device.
        bandwidth: bytes per second that a device sends on a ring along one mesh axis.
        latency: seconds per hop on the ring.
        axis_bandwidth: bandwidths of axes that differ, e.g. `{"data": 3e9}` for a data axis across hosts.
        axis_latency: latencies of axes that differ.
        reduce_scatter: whether the compiler emits reduce-scatters; XLA's CPU backend emits an all-reduce and a slice.
        merges_sums: whether partial gradients of one value are added before a single reduction; XLA's CPU backend
            reduces each.
        gathers_again: whether a split parameter can be gathered for the forward and again for the backward, which saves
            memory, or once; XLA's CPU backend gathers once, and keeps it.
        rounds_products: whether operands of products are rounded to bfloat16 where they are made, so that a parameter
            that only products use is gathered, and an activation is kept for them, in half the bytes of float32.
            Products whose result is scattered over all devices are loops that send one shard more than there are.
        recomputes: whether what element-wise operators give is computed again in the backward, not kept.
        holds_gradients: whether a constraint that splits a value otherwise than it is made constrains its gradient,
            too; the steps of XLA's CPU backend then send more.

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
    rounds_products: bool = True
    recomputes: bool = True
    holds_gradients: bool = True

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
        """Bytes per second that a device sends on a ring along this axis."""
        return self.axis_bandwidth.get(axis, self.bandwidth)

    def latency_of(self, axis: str) -> float:
        """Seconds per hop on a ring along this axis."""
        return self.axis_latency.get(axis, self.latency)

    @classmethod
    def preset(cls, name: str) -> Topology:
        """A known kind of device: `"cpu"`, `"v4"`, `"v5e"`, `"v5p"`, `"v6e"` or `"tpu7x"` (Ironwood).

        FLOP/s (bf16), memory and memory bandwidth are those Google publishes (cloud.google.com/tpu/docs, "System
        architecture", a page per generation). Bandwidth is both directions of one link of the torus, as "How to Scale
        Your Model" gives them (jax-ml.github.io/scaling-book/tpus): an approximation, because which links a mesh axis
        gets is decided when the slice is laid out. The latency of a hop is an approximation too. A chip of tpu7x is two
        devices (docs.cloud.google.com/tpu/docs/tpu7x): each has half of the chip's figures and half of a link.
        The link is taken to be that of v5p, because both publish the same bandwidth per chip (1,200 GB/s). `"cpu"` is a
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
            rounds_products=False,
            recomputes=False,
            holds_gradients=False,
        ),
        Topology(name="v4", flops=275e12, memory_bandwidth=1.2e12, memory_bytes=32 * _GIB, bandwidth=9e10),
        Topology(name="v5e", flops=197e12, memory_bandwidth=8.19e11, memory_bytes=16 * _GIB, bandwidth=9e10),
        Topology(name="v5p", flops=459e12, memory_bandwidth=2.765e12, memory_bytes=95 * _GIB, bandwidth=1.8e11),
        Topology(name="v6e", flops=918e12, memory_bandwidth=1.64e12, memory_bytes=32 * _GIB, bandwidth=1.8e11),
        Topology(name="tpu7x", flops=1153.5e12, memory_bandwidth=3.69e12, memory_bytes=96 * _GIB, bandwidth=9e10),
    )
}
