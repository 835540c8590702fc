"""`Fabric`: the cost of collectives, by the ring algorithm."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from xla_adapters.sharding.mesh import DATA, MODEL, Mesh
from xla_adapters.sharding.plan_data import Collective, CollectiveCost
from xla_adapters.sharding.planner.topology import Topology

GRADIENTS = "gradients"


@dataclass(frozen=True, kw_only=True)
class Charge:
    """The cost of one collective.

    Attributes:
        kind: e.g. `"all-reduce"`.
        axis: of the mesh.
        wire_bytes: bytes that each device sends.
        seconds: time it takes.
        cause: `"gradients"`, `"parameters"` or `"activations"`.
    """

    kind: Collective
    axis: str
    wire_bytes: float
    seconds: float
    cause: str


def times(charge: Charge, number: float) -> Charge:
    """The cost of `number` such collectives, as one charge."""
    return replace(charge, wire_bytes=charge.wire_bytes * number, seconds=charge.seconds * number)


@dataclass(frozen=True, kw_only=True)
class Fabric:
    """Computes the cost of collectives on a mesh.

    `size` is in bytes of the *gathered* tensor on one device (for an all-reduce: of the tensor). Methods return a tuple
    of charges, which is empty if the axis has one device. Collectives of gradients have no latency, because the
    compiler combines those of many parameters into few.

    Attributes:
        mesh: the devices.
        topology: bandwidths and latencies.
    """

    mesh: Mesh
    topology: Topology

    @property
    def data(self) -> int:
        """Number of devices along the data axis."""
        return self._size(DATA)

    @property
    def model(self) -> int:
        """Number of devices along the model axis."""
        return self._size(MODEL)

    def all_reduce(self, axis: str, size: float, cause: str) -> tuple[Charge, ...]:
        """A reduce-scatter and an all-gather: 2b(k-1)/k bytes, for b bytes and k devices."""
        return self._ring("all-reduce", axis, size, 2, cause)

    def all_gather(self, axis: str, size: float, cause: str) -> tuple[Charge, ...]:
        """Each device sends all shards but one: b(k-1)/k bytes."""
        return self._ring("all-gather", axis, size, 1, cause)

    def reduce_scatter(self, axis: str, size: float, cause: str, *, loop: bool = False) -> tuple[Charge, ...]:
        """b(k-1)/k bytes; an all-reduce if the compiler emits no reduce-scatter.

        Args:
            axis, size, cause: as for the others.
            loop: whether a loop of collective-permutes takes its place.
        """
        if not self.topology.reduce_scatter:
            return self.all_reduce(axis, size, cause)
        if loop:
            # It also sends a device's own shard, and the last one once more.
            size *= (self._size(axis) + 1) / max(1, self._size(axis) - 1)
        return self._ring("reduce-scatter", axis, size, 1, cause)

    def all_to_all(self, axis: str, size: float, cause: str) -> tuple[Charge, ...]:
        """Each device sends all but one k-th of its shard of b/k bytes: b(k-1)/k^2 bytes."""
        return self._ring("all-to-all", axis, size / self._size(axis), 1, cause)

    def permute(self, axis: str, size: float, cause: str) -> tuple[Charge, ...]:
        """Each device sends its shard to another: b/k bytes."""
        k = self._size(axis)
        if k == 1 or not size:
            return ()
        seconds = size / k / self.topology.bandwidth_of(axis) + self.topology.latency_of(axis)
        return (Charge(kind="collective-permute", axis=axis, wire_bytes=size / k, seconds=seconds, cause=cause),)

    def _ring(self, kind: Collective, axis: str, size: float, passes: int, cause: str) -> tuple[Charge, ...]:
        k = self._size(axis)
        if k == 1 or not size:
            return ()
        wire = passes * size * (k - 1) / k
        hops = 0 if cause == GRADIENTS else passes * (k - 1)
        seconds = wire / self.topology.bandwidth_of(axis) + hops * self.topology.latency_of(axis)
        return (Charge(kind=kind, axis=axis, wire_bytes=wire, seconds=seconds, cause=cause),)

    def _size(self, axis: str) -> int:
        return self.mesh.axis_size(axis) if axis in self.mesh.axis_names else 1


def total(charges: Iterable[tuple[Charge, float]]) -> tuple[CollectiveCost, ...]:
    """Sums charges by kind, axis and cause; each comes with its number per step."""
    sums: dict[tuple[str, str, str], list[float]] = {}
    for charge, count in charges:
        entry = sums.setdefault((charge.kind, charge.axis, charge.cause), [0.0, 0.0, 0.0])
        entry[0] += count
        entry[1] += count * charge.wire_bytes
        entry[2] += count * charge.seconds
    return tuple(
        CollectiveCost(kind=kind, axis=axis, cause=cause, count=round(count), wire_bytes=wire_bytes, seconds=seconds)
        for (kind, axis, cause), (count, wire_bytes, seconds) in sorted(sums.items())
    )
