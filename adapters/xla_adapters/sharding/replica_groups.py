"""Parses `replica_groups` of collectives in HLO text, and finds the mesh axes that they correspond to."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from typing import Literal

import numpy as np

from xla_adapters.errors import ConfigError
from xla_adapters.sharding.mesh import Mesh

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
