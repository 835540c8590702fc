"""`read_hlo`: counts the collectives of a compiled program and their communication volume.

`axis_of` finds the mesh axes that the `replica_groups` of a collective correspond to.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, cast, get_args

import numpy as np

from xla_adapters.errors import ConfigError
from xla_adapters.sharding.hlo_text import (
    Instruction,
    MemoryReport,
    Module,
    bytes_by_dtype,
    elements,
    parse_module,
    trip_count,
)
from xla_adapters.sharding.mesh import Mesh
from xla_adapters.sharding.plan_data import Collective, CollectiveCost, Measurement

Groups = tuple[tuple[int, ...], ...]
# XLA's CollectiveOpGroupMode: flattened id, cross replica, cross replica and partition, cross partition.
Ids = Literal["devices", "replicas", "replicas, all partitions", "partitions"]

_LISTED = re.compile(r"\breplica_groups=\{((?:\s*\{[\d,\s]*\}\s*,?)*)\s*\}")
_IOTA = re.compile(r"\breplica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(r"\breplica_groups=mesh\[([^\]]*)\](,\s*device_ids=\S+)?\s*\{([^}]*)\}")
_PAIRS = re.compile(r"\bsource_target_pairs=\{((?:\s*\{\s*\d+\s*,\s*\d+\s*\}\s*,?)*)\s*\}")


def read_groups(attributes: str) -> Groups:
    """The groups of an instruction, as ids; empty if it has none, or `{}` (one group of all).

    Known forms: `{{0,1},{2,3}}`, `{}`, `[2,4]<=[8]`, `[4,2]<=[2,4]T(1,0)`, `mesh['a'=2,'b'=4] {'b'}`.

    Raises:
        ConfigError: `replica_groups` has another form.
    """
    if "replica_groups=" not in attributes:
        return ()
    if found := _LISTED.search(attributes):
        groups = (_numbers(group) for group in re.findall(r"\{([^}]*)\}", found.group(1)))
        return tuple(group for group in groups if group)
    if found := _IOTA.search(attributes):
        shape, dims = _numbers(found.group(1)), _numbers(found.group(2))
        ids = np.arange(int(np.prod(dims))).reshape(dims)
        if found.group(3):
            ids = ids.transpose(_numbers(found.group(3)))
        return _rows(ids.reshape(shape[0], -1))
    if (found := _MESH.search(attributes)) and not found.group(2):
        axes = re.findall(r"'([^']+)'=(\d+)", found.group(1))
        names, sizes = [name for name, _ in axes], [int(size) for _, size in axes]
        joined = [part.strip().strip("'") for part in found.group(3).split(",") if part.strip()]
        if all(name in names for name in joined):
            return _joined_along(sizes, [names.index(name) for name in joined])
    start = attributes.index("replica_groups=")
    raise ConfigError(
        f"replica_groups are spelled in a way that is not understood: {attributes[start : start + 80]!r}; understood "
        "are {{0,1},{2,3}}, {}, [2,4]<=[8], [4,2]<=[2,4]T(1,0) and mesh['a'=2,'b'=4] {'b'}"
    )


def read_pairs(attributes: str) -> Groups:
    """The `source_target_pairs` of a collective-permute; empty if there are none."""
    found = _PAIRS.search(attributes)
    if found is None:
        return ()
    return tuple(_numbers(pair) for pair in re.findall(r"\{([^}]*)\}", found.group(1)))


def device_groups(groups: Groups, ids: Ids, *, replicas: int, partitions: int) -> Groups:
    """Converts groups of ids to groups of devices; a device is `replica * partitions + partition`.

    Args:
        groups: from `read_groups`; empty for one group of all.
        ids: the meaning of an id. `"devices"`: a device. `"replicas"`: a replica; there is one group per partition.
            `"replicas, all partitions"`: a replica with all of its partitions. `"partitions"`: a partition; there is
            one group per replica.
        replicas, partitions: numbers that the module was compiled for.
    """
    if ids == "devices":
        return groups or (tuple(range(replicas * partitions)),)
    if ids == "partitions":
        groups = groups or (tuple(range(partitions)),)
        return tuple(
            tuple(replica * partitions + partition for partition in group)
            for replica in range(replicas)
            for group in groups
        )
    groups = groups or (tuple(range(replicas)),)
    if ids == "replicas, all partitions":
        return tuple(
            tuple(replica * partitions + partition for replica in group for partition in range(partitions))
            for group in groups
        )
    return tuple(
        tuple(replica * partitions + partition for replica in group)
        for group in groups
        for partition in range(partitions)
    )


def axis_of(groups: Sequence[Sequence[int]], mesh: Mesh) -> str | None:
    """The mesh axes along which groups of devices communicate.

    Args:
        groups: of device ids (row-major in the mesh); empty for one group of all.
        mesh: the devices.

    Returns:
        The names of the axes joined by `+`, in the mesh's order; `""` if no group has two devices; None if the groups
        do not correspond to axes of this mesh.

    Raises:
        ConfigError: a device is not in the mesh.
    """
    _check_devices(groups, mesh)
    wanted = {frozenset(group) for group in groups} or {frozenset(range(mesh.size))}
    # The fewest axes first, so that an axis of length 1 is never named.
    for count in range(len(mesh.shape) + 1):
        for axes in itertools.combinations(range(len(mesh.shape)), count):
            if {frozenset(group) for group in _joined_along(mesh.shape, axes)} == wanted:
                return _names(axes, mesh)
    return None


def axis_of_pairs(pairs: Sequence[Sequence[int]], mesh: Mesh) -> str:
    """The mesh axes along which a collective-permute sends, joined by `+`; `""` if it sends nothing.

    Raises:
        ConfigError: a device is not in the mesh.
    """
    _check_devices(pairs, mesh)
    moved: set[int] = set()
    for source, target in pairs:
        start, end = np.unravel_index(source, mesh.shape), np.unravel_index(target, mesh.shape)
        moved |= {axis for axis in range(len(mesh.shape)) if start[axis] != end[axis]}
    return _names(sorted(moved), mesh)


def _check_devices(groups: Sequence[Sequence[int]], mesh: Mesh) -> None:
    largest = max((device for group in groups for device in group), default=0)
    if largest >= mesh.size:
        raise ConfigError(
            f"a collective names device {largest}; the mesh {mesh} has {mesh.size} devices: pass the mesh the program "
            "was compiled for"
        )


def _joined_along(shape: Sequence[int], axes: Sequence[int]) -> Groups:
    """Groups of the devices that differ along these axes only."""
    rest = [axis for axis in range(len(shape)) if axis not in axes]
    ids = np.arange(int(np.prod(shape))).reshape(tuple(shape)).transpose([*rest, *axes])
    return _rows(ids.reshape(int(np.prod([shape[axis] for axis in rest])), -1))


def _names(axes: Sequence[int], mesh: Mesh) -> str:
    return "+".join(mesh.axis_names[axis] for axis in axes)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(",") if number.strip())


def _rows(ids: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> Groups:
    return tuple(tuple(int(number) for number in row) for row in ids)


NO_AXIS = "(no axis)"

_TRIPS = re.compile(r'known_trip_count\\?"\s*:\s*\{\s*\\?"n\\?"\s*:\s*\\?"?(\d+)')
# For TPUs XLA compiles a reduce-scatter to a fusion of this name, with an all-reduce and a slice.
_FUSED_SCATTER = "all-reduce-scatter"
# And an asynchronous collective to a chain of fusions with other work, each with a copy of the collective.
_CHAIN = re.compile(r'\bchannel_id=(\d+)\b.*\bchain_id="(\d+)"')


@dataclass(frozen=True, kw_only=True)
class CollectiveOp:
    """One collective instruction.

    Attributes:
        name: of the instruction.
        kind: e.g. `"all-reduce"`.
        bytes_by_dtype: bytes of its result on one device, per run.
        groups: the groups of devices that communicate; empty for a collective-permute.
        pairs: source and target devices of a collective-permute.
        runs: how often it runs in one run of the program. In a loop whose trip count is not known it is counted once,
            in a branch that may not be taken as taken.
    """

    name: str
    kind: Collective
    bytes_by_dtype: Mapping[str, int]
    groups: Groups = ()
    pairs: Groups = ()
    runs: int = 1

    @property
    def group_size(self) -> int:
        """Number of devices in its largest group; for a collective-permute 2, or 1 if nothing is sent."""
        if self.kind == "collective-permute":
            return 2 if any(source != target for source, target in self.pairs) else 1
        return max((len(group) for group in self.groups), default=1)

    @property
    def result_bytes(self) -> int:
        """Bytes of its result on one device, per run."""
        return sum(self.bytes_by_dtype.values())

    @property
    def wire_bytes(self) -> float:
        """Bytes that each device sends, per run (ring algorithm)."""
        return ring_wire_bytes(self.kind, self.result_bytes, self.group_size)

    def axis(self, mesh: Mesh) -> str:
        """The mesh axes along which it communicates, joined by `+`; `"(no axis)"` if there are none."""
        found = axis_of_pairs(self.pairs, mesh) if self.pairs else axis_of(self.groups, mesh)
        return NO_AXIS if found is None else found


@dataclass(frozen=True, kw_only=True)
class HloStats:
    """The collectives of a program, as each device sees them.

    All sums are per run of the program, so a collective in a loop of 12 trips counts 12 times.

    Attributes:
        devices: number of devices that the program runs on.
        operations: all collective instructions.
    """

    devices: int
    operations: tuple[CollectiveOp, ...] = ()

    @property
    def counts(self) -> dict[str, int]:
        """How often each kind of collective runs."""
        totals: dict[str, int] = {}
        for operation in self.operations:
            totals[operation.kind] = totals.get(operation.kind, 0) + operation.runs
        return totals

    @property
    def wire_bytes(self) -> float:
        """Bytes each device sends, by all collectives."""
        return sum(operation.runs * operation.wire_bytes for operation in self.operations)

    def costs(self, mesh: Mesh) -> tuple[CollectiveCost, ...]:
        """The collectives summed by kind and mesh axis, the most bytes first.

        Raises:
            ConfigError: the program names a device that is not in the mesh.
        """
        totals: dict[tuple[str, str], tuple[int, float]] = {}
        for operation in self.operations:
            key = (operation.kind, operation.axis(mesh))
            count, wire = totals.get(key, (0, 0.0))
            totals[key] = (count + operation.runs, wire + operation.runs * operation.wire_bytes)
        costs = (
            CollectiveCost(kind=kind, axis=axis, count=count, wire_bytes=wire)
            for (kind, axis), (count, wire) in totals.items()
        )
        return tuple(sorted(costs, key=lambda cost: (-cost.wire_bytes, cost.kind, cost.axis)))

    def measurement(self, memory: MemoryReport) -> Measurement:
        """The summary that a plan stores."""
        return Measurement(wire_bytes=self.wire_bytes, memory_bytes=memory.memory_bytes, collectives=self.counts)


def ring_wire_bytes(kind: Collective, result_bytes: float, devices: int) -> float:
    """Bytes that each device sends, by the ring algorithm.

    Args:
        kind: of the collective.
        result_bytes: of the result on one device (for an all-gather the whole, for a reduce-scatter the shard).
        devices: number of devices in a group.
    """
    others = devices - 1
    if kind == "reduce-scatter":
        return float(result_bytes * others)
    if kind == "collective-permute":
        return float(result_bytes if others else 0)
    return (2 if kind == "all-reduce" else 1) * result_bytes * others / devices


def read_hlo(text: str, devices: int) -> HloStats:
    """Counts the collectives of an optimised HLO module.

    An asynchronous pair counts once. A collective in a loop counts as often as the loop runs, if the HLO states it
    (`known_trip_count`) or the loop counts up to a constant, else once.

    Args:
        text: of the module, as `--xla_dump_hlo_as_text` writes it (`*after_optimizations.txt`).
        devices: number of devices that the module was compiled for.

    Raises:
        ConfigError: the text is not HLO, was compiled for another number of devices, or has an unknown form.
    """
    if isinstance(devices, bool) or not isinstance(devices, int) or devices < 1:
        raise ConfigError(f"devices={devices!r}: give the number of devices the program was compiled for, at least 1")
    module = parse_module(text)
    stated = module.replicas * module.partitions
    if stated not in (1, devices):
        raise ConfigError(
            f"the HLO was compiled for {module.replicas} replicas of {module.partitions} partitions, {stated} devices; "
            f"read_hlo was called with devices={devices}"
        )
    walk = _Walk(module, devices)
    walk.visit(module.entry, 1, ())
    return HloStats(devices=devices, operations=tuple(walk.operations))


class _Walk:
    """Visits computations along the calls from the entry, and multiplies counts by trip counts of loops."""

    def __init__(self, module: Module, devices: int) -> None:
        self.module, self.devices = module, devices
        self.operations: list[CollectiveOp] = []
        self.chains: set[tuple[str, ...]] = set()

    def visit(self, computation: str, runs: int, path: tuple[str, ...]) -> None:
        if computation in path:
            raise ConfigError(f"the HLO calls itself: {' -> '.join((*path, computation))}")
        for instruction in self.module.computations.get(computation, ()):
            opcode = instruction.opcode
            kind = opcode.removesuffix("-start")
            if kind in get_args(Collective):
                chain = _CHAIN.search(instruction.attributes)
                if chain:
                    if chain.groups() in self.chains:
                        continue
                    self.chains.add(chain.groups())
                # The computation that it calls is the reduction of two scalars; it is not visited.
                self.operations.append(self._operation(instruction, cast(Collective, kind), computation, runs))
            elif opcode.endswith(("-done", "-update")):
                # Counted at its start; older XLA names the called computation here again.
                continue
            else:
                inner_runs = runs * self._trips(instruction, computation)
                for called in instruction.called:
                    self.visit(called, inner_runs, (*path, computation))

    def _operation(self, instruction: Instruction, kind: Collective, computation: str, runs: int) -> CollectiveOp:
        attributes = instruction.plain_attributes
        groups = () if kind == "collective-permute" else self._groups(attributes, kind)
        sizes = bytes_by_dtype(_result_type(instruction, kind))
        if kind == "all-reduce" and computation.startswith(_FUSED_SCATTER):
            kind = "reduce-scatter"
            joined = max(len(group) for group in groups)
            sizes = {dtype: math.ceil(size / joined) for dtype, size in sizes.items()}
        return CollectiveOp(
            name=instruction.name,
            kind=kind,
            bytes_by_dtype=sizes,
            groups=groups,
            pairs=read_pairs(attributes),
            runs=runs,
        )

    def _trips(self, instruction: Instruction, computation: str) -> int:
        """How often the computations that an instruction calls run."""
        if instruction.opcode != "while":
            return 1
        stated = _TRIPS.search(instruction.attributes)
        trips = int(stated.group(1)) if stated else trip_count(self.module, computation, instruction)
        return 1 if trips is None else trips

    def _groups(self, attributes: str, kind: Collective) -> Groups:
        replicas, partitions = self.module.replicas, self.module.partitions
        ids = _ids(attributes, kind)
        if replicas * partitions == 1:
            # The module does not state its number of devices; then ids are device ids.
            replicas, partitions, ids = 1, self.devices, "devices"
        groups = device_groups(read_groups(attributes), ids, replicas=replicas, partitions=partitions)
        if (largest := max(device for group in groups for device in group)) >= self.devices:
            raise ConfigError(
                f"a collective joins device {largest}; read_hlo was called with devices={self.devices}: give the "
                "number of devices the program was compiled for"
            )
        return groups


def _ids(attributes: str, kind: Collective) -> Ids:
    """The meaning of the ids in `replica_groups` (`GetCollectiveOpGroupMode` of XLA)."""
    if "channel_id=" not in attributes:
        return "replicas"
    if kind == "all-to-all":
        return "partitions"
    return "devices" if "use_global_device_ids=true" in attributes else "replicas, all partitions"


def _result_type(instruction: Instruction, kind: Collective) -> str:
    """The type of the result. Instructions `*-start` return their operands, too, except `all-reduce-start`."""
    if not instruction.opcode.endswith("-start") or kind == "all-reduce":
        return instruction.type
    parts = elements(instruction.type)
    return parts[1] if len(parts) > 1 else instruction.type
