from __future__ import annotations

import pytest

from tests.sharding.hlo_programs import GRID, program, the_only
from xla_adapters.errors import ConfigError
from xla_adapters.sharding import Mesh
from xla_adapters.sharding.hlo import axis_of, axis_of_pairs, read_groups


@pytest.mark.parametrize(
    ("spelled", "groups"),
    [
        ("{{0,1},{2,3},{4,5},{6,7}}", ((0, 1), (2, 3), (4, 5), (6, 7))),
        ("{{0,4},{1,5}, {2,6}, {3,7}}", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("[2,4]<=[8]", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("[4,2]<=[2,4]T(1,0)", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("[4,2]<=[2,2,2]T(0,2,1)", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("[1,8]<=[8]", ((0, 1, 2, 3, 4, 5, 6, 7),)),
        ("mesh['a'=2,'b'=4] {'b'}", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("mesh['a'=2,'b'=4] {'a'}", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("mesh['a'=2,'b'=2,'c'=2] {'a','b'}", ((0, 2, 4, 6), (1, 3, 5, 7))),
        ("{}", ((0, 1, 2, 3, 4, 5, 6, 7),)),
        ("{{}}", ((0, 1, 2, 3, 4, 5, 6, 7),)),
    ],
)
def test_replica_groups_in_every_spelling(spelled: str, groups: tuple[tuple[int, ...], ...]) -> None:
    line = f"%c = f32[8] all-reduce(%p), channel_id=1, replica_groups={spelled}, use_global_device_ids=true, to_apply="
    operation = the_only(program(line + "%add"))
    assert operation.groups == groups
    assert operation.group_size == len(groups[0])


@pytest.mark.parametrize(
    "spelled", ["mesh['a'=2,'b'=4] {'a':(1)2}", "mesh['a'=8], device_ids=([2,4]T(1,0)) {'a'}", "8"]
)
def test_a_spelling_that_is_not_understood_is_named(spelled: str) -> None:
    with pytest.raises(ConfigError, match=r"spelled in a way that is not understood: .replica_groups="):
        read_groups(f", channel_id=1, replica_groups={spelled}, dimensions={{0}}")


def test_no_groups_at_all_are_all_devices() -> None:
    assert the_only(program("%c = f32[8] all-reduce(%p), channel_id=1, to_apply=%add")).group_size == 8


@pytest.mark.parametrize(
    ("header", "attributes", "size", "first"),
    [
        # A channel without global ids: all partitions of these replicas.
        ("num_partitions=8", "channel_id=1, replica_groups={{0}}", 8, (0, 1, 2, 3, 4, 5, 6, 7)),
        ("replica_count=2, num_partitions=4", "channel_id=1, replica_groups={{0},{1}}", 4, (0, 1, 2, 3)),
        # No channel: the same partition of these replicas.
        ("replica_count=2, num_partitions=4", "replica_groups={{0,1}}", 2, (0, 4)),
        ("replica_count=2, num_partitions=4", "replica_groups={}", 2, (0, 4)),
        ("replica_count=8", "replica_groups={{0,1},{2,3},{4,5},{6,7}}", 2, (0, 1)),
        # A module that does not say how many devices there are.
        ("is_scheduled=true", "replica_groups={{0,1},{2,3},{4,5},{6,7}}", 2, (0, 1)),
        ("is_scheduled=true", "replica_groups={}", 8, (0, 1, 2, 3, 4, 5, 6, 7)),
    ],
)
def test_what_the_ids_count(header: str, attributes: str, size: int, first: tuple[int, ...]) -> None:
    line = f"%c = f32[8] all-reduce(%p), {attributes}, to_apply=%add"
    operation = the_only(program(line, header=f"HloModule m, {header}"))
    assert (operation.group_size, operation.groups[0]) == (size, first)


def test_an_all_to_all_counts_partitions_in_every_replica() -> None:
    line = "%c = f32[8] all-to-all(%p), channel_id=1, replica_groups={{0,1},{2,3}}, dimensions={0}"
    operation = the_only(program(line, header="HloModule m, replica_count=2, num_partitions=4"))
    assert operation.groups == ((0, 1), (2, 3), (4, 5), (6, 7))


@pytest.mark.parametrize(
    ("groups", "mesh", "axis"),
    [
        ([(0, 1, 2, 3), (4, 5, 6, 7)], GRID, "model"),
        ([(7, 4, 5, 6), (3, 0, 1, 2)], GRID, "model"),
        ([(0, 4), (1, 5), (2, 6), (3, 7)], GRID, "data"),
        ([tuple(range(8))], GRID, "data+model"),
        ([], GRID, "data+model"),
        ([(number,) for number in range(8)], GRID, ""),
        ([(0, 1), (2, 3), (4, 5), (6, 7)], GRID, None),
        ([(0, 1, 2, 3)], GRID, None),
        ([tuple(range(8))], Mesh.data_and_model(8, 1), "data"),
        ([(0, 2), (1, 3), (4, 6), (5, 7)], Mesh(shape=(2, 2, 2), axis_names=("a", "b", "c")), "b"),
        ([(0, 1, 4, 5), (2, 3, 6, 7)], Mesh(shape=(2, 2, 2), axis_names=("a", "b", "c")), "a+c"),
    ],
)
def test_axes_by_name(groups: list[tuple[int, ...]], mesh: Mesh, axis: str | None) -> None:
    assert axis_of(groups, mesh) == axis


def test_axes_of_permutes() -> None:
    assert axis_of_pairs([(0, 1), (1, 2), (3, 0)], GRID) == "model"
    assert axis_of_pairs([(0, 4), (5, 1)], GRID) == "data"
    assert axis_of_pairs([(0, 5)], GRID) == "data+model"
    assert axis_of_pairs([(2, 2)], GRID) == ""


def test_a_device_outside_of_the_mesh_is_refused() -> None:
    for call in (lambda: axis_of([(0, 8)], GRID), lambda: axis_of_pairs([(0, 8)], GRID)):
        with pytest.raises(ConfigError, match="names device 8; the mesh data=2 x model=4 has 8 devices"):
            call()
