"""What collectives cost on a ring."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from xla_adapters.sharding.mesh import DATA, MODEL, Mesh
from xla_adapters.sharding.plan import Collective, CollectiveCost
from xla_adapters.sharding.planner.topology import Topology

GRADIENTS = "gradients"


@dataclass(frozen=True, kw_only=True)
class Charge:
    """One collective.

    Attributes:
        kind: of it.
        axis: of the mesh.
        wire_bytes: sent by each device.
        seconds: it takes.
        cause: what it is for.
    """

    kind: Collective
    axis: str
    wire_bytes: float
    seconds: float
    cause: str


def times(charge: Charge, number: float) -> Charge:
    """So many of them, as one."""
    return replace(charge, wire_bytes=charge.wire_bytes * number, seconds=charge.seconds * number)


@dataclass(frozen=True, kw_only=True)
class Fabric:
    """The mesh and what its links can do: gives the price of each collective.

    All sizes are bytes of the *gathered* tensor on one device (for an all-reduce: of the tensor). Every method returns
    a tuple: empty where there is nobody to talk to. Gradients cost no latency: the compiler combines those of many
    parameters into few collectives.
    """

    mesh: Mesh
    topology: Topology

    @property
    def data(self) -> int:
        """Devices the batch is split over."""
        return self._size(DATA)

    @property
    def model(self) -> int:
        """Devices layers are split over."""
        return self._size(MODEL)

    def all_reduce(self, axis: str, size: float, cause: str) -> tuple[Charge, ...]:
        """A reduce-scatter and an all-gather: 2b(k-1)/k."""
        return self._ring("all-reduce", axis, size, 2, cause)

    def all_gather(self, axis: str, size: float, cause: str) -> tuple[Charge, ...]:
        """Every device passes on all shards but one: b(k-1)/k."""
        return self._ring("all-gather", axis, size, 1, cause)

    def reduce_scatter(self, axis: str, size: float, cause: str) -> tuple[Charge, ...]:
        """b(k-1)/k; an all-reduce where the compiler has no reduce-scatter."""
        if not self.topology.reduce_scatter:
            return self.all_reduce(axis, size, cause)
        return self._ring("reduce-scatter", axis, size, 1, cause)

    def all_to_all(self, axis: str, size: float, cause: str) -> tuple[Charge, ...]:
        """Each device keeps one part in k of its shard of b/k: b(k-1)/k^2."""
        return self._ring("all-to-all", axis, size / self._size(axis), 1, cause)

    def permute(self, axis: str, size: float, cause: str) -> tuple[Charge, ...]:
        """Each device hands its shard of b/k to another."""
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
    """Charges and how often each occurs in a step, summed by kind, axis and cause."""
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
