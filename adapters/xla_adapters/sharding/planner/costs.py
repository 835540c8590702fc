"""The model of cost: figures of devices and links (`Topology`), collectives (`Fabric`), and storage of parameters."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from xla_adapters.errors import ConfigError
from xla_adapters.sharding.mesh import DATA, MODEL, DimSpec, Mesh, Spec, axes_of
from xla_adapters.sharding.plan_data import Collective, CollectiveCost
from xla_adapters.sharding.planner.graph import Operand, Operator


@dataclass(frozen=True, kw_only=True)
class Topology:
    """The figures of one device and its links, for the planner's cost model.

    Args:
        name: for messages.
        flops: operations per second in matrix products.
        memory_bandwidth: bytes per second between the device and its memory; limits all other operations.
        memory_bytes: of the device.
        bandwidth: bytes per second that a device sends on a ring along a mesh axis.
        latency: seconds per hop on the ring.
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
    """

    name: str
    flops: float
    memory_bandwidth: float
    memory_bytes: float
    bandwidth: float
    latency: float = 1e-6
    reduce_scatter: bool = True
    merges_sums: bool = True
    gathers_again: bool = True
    rounds_products: bool = True
    recomputes: bool = True
    holds_gradients: bool = True

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


GRADIENTS = "gradients"

# The dimension of a tensor that is split over the model axis; None if none is.
State = int | None


def times(charge: CollectiveCost, number: float) -> CollectiveCost:
    """The cost of `number` such collectives, as one charge."""
    return replace(charge, wire_bytes=charge.wire_bytes * number, seconds=charge.seconds * number)


@dataclass(frozen=True, kw_only=True)
class Fabric:
    """Computes the cost of collectives on a mesh, and says which dimensions of tensors divide.

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

    def all_reduce(self, axis: str, size: float, cause: str) -> tuple[CollectiveCost, ...]:
        """A reduce-scatter and an all-gather: 2b(k-1)/k bytes, for b bytes and k devices."""
        return self._ring("all-reduce", axis, size, 2, cause)

    def all_gather(self, axis: str, size: float, cause: str) -> tuple[CollectiveCost, ...]:
        """Each device sends all shards but one: b(k-1)/k bytes."""
        return self._ring("all-gather", axis, size, 1, cause)

    def reduce_scatter(self, axis: str, size: float, cause: str, *, loop: bool = False) -> tuple[CollectiveCost, ...]:
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

    def all_to_all(self, axis: str, size: float, cause: str) -> tuple[CollectiveCost, ...]:
        """Each device sends all but one k-th of its shard of b/k bytes: b(k-1)/k^2 bytes."""
        return self._ring("all-to-all", axis, size / self._size(axis), 1, cause)

    def permute(self, axis: str, size: float, cause: str) -> tuple[CollectiveCost, ...]:
        """Each device sends its shard to another: b/k bytes."""
        k = self._size(axis)
        if k == 1 or not size:
            return ()
        seconds = size / k / self.topology.bandwidth + self.topology.latency
        return (_one("collective-permute", axis, size / k, seconds, cause),)

    def splits(self, shape: Sequence[int], dim: int, batch: int | None) -> bool:
        """Whether a dimension can be split over the model axis, in addition to the batch over the data axis."""
        parts = self.model * (self.data if dim == batch else 1)
        return self.model > 1 and shape[dim] % parts == 0

    def states(self, operand: Operand | Operator) -> list[State]:
        """All possible states of a tensor."""
        return [None, *(dim for dim in range(len(operand.shape)) if self.splits(operand.shape, dim, operand.batch))]

    def local(self, operand: Operand | Operator, state: State = None) -> float:
        """Bytes of a tensor on one device."""
        parts = (self.data if operand.batch is not None else 1) * (1 if state is None else self.model)
        return operand.size / parts

    def touch(self, operator: Operator, state: State) -> float:
        """Seconds of an element-wise operator: memory traffic of the output, once forward and twice backward."""
        return 3 * self.local(operator, state) / self.topology.memory_bandwidth

    def sum_up(self, size: float, cause: str = "activations") -> tuple[CollectiveCost, ...]:
        """An all-reduce over the model axis."""
        return self.all_reduce(MODEL, size, cause)

    def _ring(self, kind: Collective, axis: str, size: float, passes: int, cause: str) -> tuple[CollectiveCost, ...]:
        k = self._size(axis)
        if k == 1 or not size:
            return ()
        wire = passes * size * (k - 1) / k
        hops = 0 if cause == GRADIENTS else passes * (k - 1)
        seconds = wire / self.topology.bandwidth + hops * self.topology.latency
        return (_one(kind, axis, wire, seconds, cause),)

    def _size(self, axis: str) -> int:
        return self.mesh.axis_size(axis) if axis in self.mesh.axis_names else 1


def _one(kind: Collective, axis: str, wire_bytes: float, seconds: float, cause: str) -> CollectiveCost:
    return CollectiveCost(kind=kind, axis=axis, count=1, wire_bytes=wire_bytes, seconds=seconds, cause=cause)


def collective_seconds(items: Iterable[CollectiveCost], topology: Topology) -> float:
    """Time of collectives. Latency is ignored: compilers for real links combine collectives."""
    return sum(item.wire_bytes / topology.bandwidth for item in items)


def total(charges: Iterable[tuple[CollectiveCost, float]]) -> tuple[CollectiveCost, ...]:
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


# Adam's two averages, in the dtype of the parameter.
ADAM_COPIES = 2
# libtpu makes a loop if its product takes longer than this share of the time that sending its result takes. Read from
# compiled steps: loops at 0.47 (v5e, 2,048 tokens of a device) and 0.34 (v4), none at 0.23 (v5e, 1,024) and 0.2 (v6e).
_LOOP_SHARE = 0.3


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """A class of equal parameters that get the same spec (those of equal layers).

    Attributes:
        name: of the parameter that represents the class.
        shape: of each.
        itemsize: bytes per element.
        trainable: whether they have a gradient and optimizer state.
        count: number of parameters in the class.
        fixed: the spec, if it is given.
        uses: number of operators that use each; more than one for tied weights.
        lookups: for each use as an embedding, the bytes of the rows that are looked up.
        products: whether all uses are products.
        rows: how many rows of the batch's values the gradient of a product is summed over.
    """

    name: str
    shape: tuple[int, ...]
    itemsize: int
    trainable: bool
    count: int
    fixed: Spec | None = None
    uses: int = 1
    lookups: tuple[float, ...] = ()
    products: bool = False
    rows: int = 0

    @property
    def size(self) -> float:
        """Bytes of one parameter."""
        return float(math.prod(self.shape)) * self.itemsize


def gathered_size(parameter: Parameter, fabric: Fabric) -> float:
    """Bytes of one parameter as it is gathered to be used."""
    halved = fabric.topology.rounds_products and parameter.products and parameter.itemsize == 4
    return parameter.size / (2 if halved else 1)


def loops(parameter: Parameter, spec: Spec, fabric: Fabric) -> bool:
    """Whether the gradient is scattered by a loop of collective-permutes while it is computed.

    So are products over all devices whose computing takes long enough to hide the permutes.
    """
    if not parameter.trainable or parameter.uses <= len(parameter.lookups) or split_dim(spec, DATA) is None:
        return False
    topology = fabric.topology
    computing = 2 * parameter.rows / fabric.data / topology.flops
    sending = parameter.itemsize / topology.bandwidth
    return topology.rounds_products and fabric.data == fabric.mesh.size > 1 and computing >= _LOOP_SHARE * sending


def gather_counts(parameter: Parameter, spec: Spec, fabric: Fabric) -> tuple[int, ...]:
    """How often a parameter that is stored so may be gathered over the data axis in a step; (0,) if it is not split."""
    if split_dim(spec, DATA) is None:
        return (0,)
    # Once keeps it for the backward.
    return (1, 2) if fabric.topology.gathers_again and parameter.trainable else (1,)


def split_dim(spec: Spec, axis: str) -> int | None:
    """The dimension that is split over an axis; None if none is."""
    return next((dim for dim, entry in enumerate(spec) if axis in axes_of(entry)), None)


def stored_specs(parameter: Parameter, mesh: Mesh) -> list[Spec]:
    """The specs to choose from: split over the model axis, the data axis, both or none, where dimensions divide."""
    if parameter.fixed is not None:
        return [parameter.fixed]
    rank = len(parameter.shape)
    # Of many dimensions (kernels of convolutions) the three largest are enough.
    dims = sorted(sorted(range(rank), key=lambda dim: (-parameter.shape[dim], dim))[:3])
    axes = {axis for axis in (DATA, MODEL) if axis in mesh.axis_names and mesh.axis_size(axis) > 1}
    found: list[Spec] = []
    for model in [None, *dims] if MODEL in axes else [None]:
        for data in [None, *dims] if DATA in axes else [None]:
            spec: list[DimSpec] = [None] * rank
            if model is not None:
                spec[model] = MODEL
            if data is not None:
                if data == model:
                    # If one dimension is split over both axes, GSPMD cannot gather one axis only, and gathers both.
                    continue
                spec[data] = DATA
            if all(size % mesh.parts(entry) == 0 for size, entry in zip(parameter.shape, spec, strict=True)):
                found.append(tuple(spec))
    return found


def data_charges(parameter: Parameter, spec: Spec, fabric: Fabric, gathers: int) -> tuple[CollectiveCost, ...]:
    """Collectives on the data axis: gradients are reduced, and split parameters are gathered (ZeRO, FSDP).

    Args:
        parameter, spec, fabric: which, how it is stored, and where.
        gathers: how often it is gathered.
    """
    size = parameter.size / (1 if split_dim(spec, MODEL) is None else fabric.model)
    # The gradient of a lookup is scattered into zeros, and is reduced by itself.
    products = parameter.uses - len(parameter.lookups)
    sums = min(products, 1) if fabric.topology.merges_sums else products
    if split_dim(spec, DATA) is None:
        return fabric.all_reduce(DATA, size, GRADIENTS) * (sums + len(parameter.lookups)) if parameter.trainable else ()
    whole = size * gathered_size(parameter, fabric) / parameter.size
    gathered = fabric.all_gather(DATA, whole, "parameters") * gathers
    if not parameter.trainable:
        return gathered
    scatter = fabric.reduce_scatter(DATA, size, GRADIENTS, loop=loops(parameter, spec, fabric)) * sums
    for rows in parameter.lookups:
        # Each device needs the gradients of all looked-up rows for its shard of the table.
        own = rows / (fabric.model if split_dim(spec, MODEL) == 1 else 1)
        moves = fabric.all_gather if split_dim(spec, DATA) == 0 else fabric.all_to_all
        scatter += moves(DATA, own, GRADIENTS)
    return (*gathered, *scatter)


def use_charges(
    parameter: Parameter, stored: int | None, used: int | None, partial: bool, whole: bool, fabric: Fabric
) -> tuple[CollectiveCost, ...]:
    """Collectives on the model axis, from the stored to the used layout of a parameter, and back for its gradient.

    A parameter that is split along a dimension is used with that split, or gathered.

    Args:
        parameter: the parameter.
        stored, used: the dimension split over the model axis, or None.
        partial: whether each device has only a partial sum of the gradient.
        whole: whether the parameter is not split over the data axis.
        fabric: the cost of collectives.
    """
    size = parameter.size
    trainable = parameter.trainable
    if stored == used and stored is not None:
        return ()
    if stored is None and used is None:
        # The gradient is reduced over both axes at once; the model axis adds the volume of a data shard.
        return fabric.all_reduce(MODEL, size / fabric.data, GRADIENTS) if partial and trainable else ()
    if stored is None:
        return fabric.all_gather(MODEL, size, GRADIENTS) if trainable else ()
    assert used is None
    gathers = fabric.all_gather(MODEL, gathered_size(parameter, fabric), "parameters") * _gathers(fabric)
    if not trainable:
        return gathers
    if partial:
        return (*gathers, *fabric.reduce_scatter(MODEL, size, GRADIENTS))
    # Each device reduces the whole gradient over the data axis, not only its shard; this is the difference.
    more = size - size / fabric.model
    return (*gathers, *(fabric.all_reduce if whole else fabric.reduce_scatter)(DATA, more, GRADIENTS))


def _gathers(fabric: Fabric) -> int:
    return 2 if fabric.topology.gathers_again else 1


def stored_bytes(parameter: Parameter, spec: Spec, fabric: Fabric, gathers: int) -> dict[str, float]:
    """Bytes per device by kind, of all parameters of the class together.

    Args:
        parameter, spec, fabric: which, how it is stored, and where.
        gathers: how often it is gathered over the data axis; a parameter that is gathered once is kept.
    """
    elements = parameter.count * math.prod(parameter.shape) / fabric.mesh.shards(spec)
    found = {"parameters": elements * parameter.itemsize}
    if parameter.trainable:
        found["gradients"] = elements * parameter.itemsize
        found["optimizer"] = elements * ADAM_COPIES * parameter.itemsize
    if gathers == 1:
        found["gathered"] = elements * fabric.data * gathered_size(parameter, fabric) / math.prod(parameter.shape)
    return found
