"""Collectives and memory read from HLO text, and from what XLA's compiler really wrote."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from xla_adapters.errors import ConfigError
from xla_adapters.sharding import CollectiveCost, HloStats, Measurement, Mesh, read_hlo
from xla_adapters.sharding.communication_volume import (
    CollectiveOp,
    axis_of,
    axis_of_pairs,
    read_groups,
    ring_wire_bytes,
)
from xla_adapters.sharding.hlo_text import MemoryReport, bytes_by_dtype, elements, read_memory_report
from xla_adapters.sharding.visualize import slices

GRID = Mesh.data_and_model(2, 4)
GLOBAL = "channel_id=1, replica_groups={{0,1,2,3},{4,5,6,7}}, use_global_device_ids=true"


def program(*lines: str, header: str = "HloModule m, is_scheduled=true, num_partitions=8", before: str = "") -> str:
    body = "\n".join(f"  {line}" for line in lines)
    return f"""{header}

%add (x: f32[], y: f32[]) -> f32[] {{
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}}

{before}
ENTRY %main (p: f32[32,32]) -> f32[32,32] {{
  %p = f32[32,32]{{1,0}} parameter(0)
{body}
}}
"""


def the_only(text: str, devices: int = 8) -> CollectiveOp:
    (operation,) = read_hlo(text, devices).operations
    return operation


@pytest.mark.parametrize(
    ("line", "kind", "result", "wire"),
    [
        (f"%c = f32[32,32]{{1,0}} all-reduce(%p), {GLOBAL}, to_apply=%add", "all-reduce", 4096, 2 * 4096 * 3 / 4),
        (f"%c = f32[128,32]{{1,0}} all-gather(%p), {GLOBAL}, dimensions={{0}}", "all-gather", 16384, 16384 * 3 / 4),
        (
            f"%c = f32[8,32]{{1,0}} reduce-scatter(%p), {GLOBAL}, dimensions={{0}}, to_apply=%add",
            "reduce-scatter",
            1024,
            1024 * 3,
        ),
        (
            "%c = f32[32,32]{1,0} all-to-all(%p), channel_id=1, replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={0}",
            "all-to-all",
            4096,
            4096 * 3 / 4,
        ),
        (
            "%c = f32[32,32]{1,0} collective-permute(%p), channel_id=1, source_target_pairs={{0,1},{1,2},{2,3},{3,0}}",
            "collective-permute",
            4096,
            4096,
        ),
    ],
)
def test_every_kind_by_its_ring(line: str, kind: str, result: int, wire: float) -> None:
    stats, operation = read_hlo(program(line), 8), the_only(program(line))
    assert (stats.counts, stats.wire_bytes) == ({kind: 1}, wire)
    assert operation.bytes_by_dtype == {"f32": result}
    assert operation.axis(GRID) == "model"


def test_nothing_is_sent_to_oneself() -> None:
    alone = "replica_groups={{0},{1},{2},{3},{4},{5},{6},{7}}, use_global_device_ids=true"
    assert read_hlo(program(f"%c = f32[8] all-reduce(%p), channel_id=1, {alone}, to_apply=%add"), 8).wire_bytes == 0
    assert read_hlo(program("%c = f32[8] collective-permute(%p), source_target_pairs={{0,0},{1,1}}"), 8).wire_bytes == 0
    assert ring_wire_bytes("reduce-scatter", 100, 1) == 0


@pytest.mark.parametrize(
    ("line", "sizes"),
    [
        ("%c = (f32[8]{0}, bf16[16]{0}) all-reduce(%p, %q), " + GLOBAL, {"f32": 32, "bf16": 32}),
        ("%c = (f32[8], /*index=1*/f32[], f32[2,2]) all-reduce(%p, %q, %r), " + GLOBAL, {"f32": 32 + 4 + 16}),
        (
            "%c = (f32[8,1]{1,0:T(8,128)S(1)}, f32[8,1]{1,0:T(8,128)(2,1)}) all-to-all(f32[8,1] %p, f32[8,1] %q), "
            "channel_id=1, replica_groups={{0,1},{2,3},{4,5},{6,7}}",
            {"f32": 64},
        ),
    ],
)
def test_combined_collectives_are_one_with_the_bytes_of_all(line: str, sizes: dict[str, int]) -> None:
    operation = the_only(program(line))
    assert operation.bytes_by_dtype == sizes
    assert operation.result_bytes == sum(sizes.values())


@pytest.mark.parametrize(
    ("start", "done", "kind", "result"),
    [
        (f"%s = f32[32] all-reduce-start(%p), {GLOBAL}, to_apply=%add", "all-reduce-done(%s)", "all-reduce", 128),
        (f"%s = (f32[32], f32[8]) all-reduce-start(%p, %q), {GLOBAL}", "all-reduce-done(%s)", "all-reduce", 160),
        (f"%s = (f32[8], f32[32]) all-gather-start(%p), {GLOBAL}", "all-gather-done(%s)", "all-gather", 128),
        (
            f"%s = ((f32[8], bf16[8]), (f32[32], bf16[32])) all-gather-start(%p, %q), {GLOBAL}",
            "all-gather-done(%s)",
            "all-gather",
            192,
        ),
        (
            f"%s = ((f32[32]), f32[8], u32[], u32[]) reduce-scatter-start(%p), {GLOBAL}, to_apply=%add",
            "reduce-scatter-done(%s)",
            "reduce-scatter",
            32,
        ),
        (
            "%s = (f32[8], f32[8], u32[], u32[]) collective-permute-start(%p), source_target_pairs={{0,1},{1,0}}",
            "collective-permute-done(%s)",
            "collective-permute",
            32,
        ),
    ],
)
def test_asynchronous_pairs_count_once_and_with_the_result_only(start: str, done: str, kind: str, result: int) -> None:
    operation = the_only(program(start, f"ROOT %d = f32[32] {done}"))
    assert (operation.kind, operation.result_bytes) == (kind, result)


def test_a_wrapped_asynchronous_collective_counts_once() -> None:
    wrapped = """%wrapped (q: f32[32]) -> f32[8] {
  %q = f32[32] parameter(0)
  ROOT %rs = f32[8] reduce-scatter(%q), channel_id=3, replica_groups=[2,4]<=[8], use_global_device_ids=true
}
"""
    lines = (
        "%s = ((f32[32]), f32[8], u32[]) async-start(%p), calls=%wrapped",
        "%u = ((f32[32]), f32[8], u32[]) async-update(%s), calls=%wrapped",
        "ROOT %d = f32[8] async-done(%u), calls=%wrapped",
    )
    stats = read_hlo(program(*lines, before=wrapped), 8)
    assert (stats.counts, stats.wire_bytes) == ({"reduce-scatter": 1}, 96)


LOOP = """%body (t: (s32[], f32[32,32])) -> (s32[], f32[32,32]) {
  %t = (s32[], f32[32,32]) parameter(0)
  %g = f32[32,32] get-tuple-element(%t), index=1
  %c = f32[32,32] all-reduce(%g), channel_id=1, replica_groups=[2,4]<=[8], use_global_device_ids=true, to_apply=%add
  ROOT %r = (s32[], f32[32,32]) tuple(%g, %c)
}

%condition (t: (s32[], f32[32,32])) -> pred[] {
  %t = (s32[], f32[32,32]) parameter(0)
  ROOT %less = pred[] compare(%t, %t), direction=LT
}
"""
WHILE = "%w = (s32[], f32[32,32]) while(%p), condition=%condition, body=%body"


@pytest.mark.parametrize(
    "config",
    [
        'backend_config={"known_trip_count":{"n":"12"}}',
        'metadata={op_name="jit(f)/while"}, backend_config={"x":1,"known_trip_count":{"n":"12"},"y":{"init":"0"}}',
        r'backend_config="{\"known_trip_count\":{\"n\":\"12\"}}"',
    ],
)
def test_a_loop_multiplies_what_is_in_it(config: str) -> None:
    stats = read_hlo(program(f"{WHILE}, {config}", before=LOOP), 8)
    assert (stats.counts, stats.wire_bytes) == ({"all-reduce": 12}, 12 * 2 * 4096 * 3 / 4)
    assert stats.costs(GRID)[0].count == 12


def test_a_loop_in_a_loop_multiplies_twice() -> None:
    outer = f"""%outer (t: (s32[], f32[32,32])) -> (s32[], f32[32,32]) {{
  %t = (s32[], f32[32,32]) parameter(0)
  ROOT {WHILE.replace("%p", "%t")}, backend_config={{"known_trip_count":{{"n":"3"}}}}
}}
"""
    line = "%o = (s32[], f32[32,32]) while(%p), condition=%condition, body=%outer, "
    stats = read_hlo(program(line + 'backend_config={"known_trip_count":{"n":"5"}}', before=LOOP + outer), 8)
    assert stats.counts == {"all-reduce": 15}


@pytest.mark.parametrize(
    "line", [WHILE, "%b = f32[32,32] conditional(%p, %p, %p), branch_computations={%body, %condition}"]
)
def test_a_loop_of_unknown_length_and_a_branch_count_once(line: str) -> None:
    assert read_hlo(program(line, before=LOOP), 8).counts == {"all-reduce": 1}


COUNTED = """%counted (t: (u32[], f32[32,32])) -> (u32[], f32[32,32]) {
  %t = (u32[], f32[32,32]) parameter(0)
  %number = u32[] get-tuple-element(%t), index=0
  %two = u32[] constant(2)
  %next = u32[] add(COUNTER, %two)
  %value = f32[32,32] get-tuple-element(%t), index=1
  %sent = f32[32,32] collective-permute(%value), source_target_pairs={{0,1},{1,0}}
  ROOT %out = (u32[], f32[32,32]) tuple(%next, %sent)
}

%until (t: (u32[], f32[32,32])) -> pred[] {
  %t = (u32[], f32[32,32]) parameter(0)
  %number = u32[] get-tuple-element(%t), index=0
  %end = u32[] constant(8)
  ROOT %less = pred[] compare(COUNTER, %end), direction=LT
}
"""
COUNTING = (
    "%one = u32[] constant(1)",
    "%begin = u32[] copy(%one)",
    "%both = (u32[], f32[32,32]) tuple(%begin, /*index=1*/%p)",
    "%w = (u32[], f32[32,32]) while((u32[], f32[32,32]) %both), condition=%until, body=%counted",
)


@pytest.mark.parametrize("counter", ["%t#0", "%number", "u32[]{:T(128)} %number"])
def test_a_loop_that_counts_up_to_a_constant_has_that_length(counter: str) -> None:
    """As the loops of windowed products, for which XLA states no length: 1, 3, 5, 7."""
    stats = read_hlo(program(*COUNTING, before=COUNTED.replace("COUNTER", counter)), 8)
    assert stats.counts == {"collective-permute": 4}


@pytest.mark.parametrize(
    ("known", "unknown"),
    [
        ("direction=LT", "direction=NE"),
        ("%end = u32[] constant(8)", "%end = u32[] get-tuple-element(%t), index=0"),
        ("add(%number, %two)", "multiply(%number, %two)"),
        ("tuple(%next, %sent)", "tuple(%two, %sent)"),
        ("%two = u32[] constant(2)", "%two = u32[] constant(0)"),
        ("compare(%number, %end)", "compare(%end, %number)"),
    ],
)
def test_other_loops_count_once(known: str, unknown: str) -> None:
    before = COUNTED.replace("COUNTER", "%number")
    assert known in before
    stats = read_hlo(program(*COUNTING, before=before.replace(known, unknown)), 8)
    assert stats.counts == {"collective-permute": 1}


def test_computations_that_do_not_run_do_not_count() -> None:
    assert read_hlo(program("%q = f32[32,32] copy(%p)", before=LOOP), 8) == HloStats(devices=8)


def test_a_reduce_scatter_a_tpu_fused_is_one() -> None:
    # As libtpu writes it: two gradients combined, an all-reduce in a fusion of this name, and slices of it.
    whole = "bf16[1024,1024]{1,0:T(8,128)(2,1)}"
    groups = "channel_id=20, replica_groups={{0,4},{1,5},{2,6},{3,7}}, use_global_device_ids=true"
    fused = f"""%all-reduce-scatter.2.clone (a: {whole}, b: {whole}) -> (bf16[512,1024], bf16[1024,512]) {{
  %a = {whole} parameter(0)
  %b = {whole} parameter(1)
  %r = ({whole}, {whole}) all-reduce(%a, %b), {groups}, to_apply=%add
  ROOT %t = (bf16[512,1024], bf16[1024,512]) tuple(%r, %r)
}}
"""
    line = "%f = (bf16[512,1024], bf16[1024,512]) fusion(%p, %p), kind=kCustom, calls=%all-reduce-scatter.2.clone"
    operation = the_only(program(line, before=fused))
    assert operation.kind == "reduce-scatter"
    assert operation.result_bytes == 2 * 512 * 1024 * 2
    assert operation.wire_bytes == operation.result_bytes
    assert operation.axis(GRID) == "data"


def test_a_chain_of_fusions_that_share_one_collective_is_one() -> None:
    # As libtpu writes an all-gather that runs beside a matrix product: start, middle and end each name it.
    gather = 'all-gather(%q), channel_id=15, replica_groups=[4,2]<=[2,4]T(1,0), frontend_attributes={chain_id="0"}'
    gather = gather.replace("frontend", "use_global_device_ids=true, frontend")
    pieces = "".join(
        f"%{name} (q: bf16[8]) -> bf16[16] {{\n  %q = bf16[8] parameter(0)\n  ROOT %g = bf16[16] {gather}\n}}\n"
        for name in ("start", "async_collective_fusion.1", "end")
    )
    lines = [f"%f{name} = bf16[16] fusion(%p), kind=kCustom, calls=%{name}" for name in ("start", "end")]
    lines.insert(1, "%f = bf16[16] fusion(%p), kind=kOutput, calls=%async_collective_fusion.1")
    stats = read_hlo(program(*lines, before=pieces), 8)
    assert (stats.counts, stats.wire_bytes) == ({"all-gather": 1}, 16)
    other = pieces.replace("channel_id=15", "channel_id=16").replace(" (q:", "_2 (q:")
    lines += [line.replace("%f", "%g") + "_2" for line in lines]
    assert read_hlo(program(*lines, before=pieces + other), 8).counts == {"all-gather": 2}


@pytest.mark.parametrize(
    ("type_text", "sizes"),
    [
        ("f32[]", {"f32": 4}),
        ("bf16[3,5]{1,0}", {"bf16": 30}),
        ("f8e4m3fn[10]", {"f8e4m3fn": 10}),
        ("f8e5m2fnuz[10]", {"f8e5m2fnuz": 10}),
        ("f4e2m1fn[10]{0:E(4)}", {"f4e2m1fn": 5}),
        ("pred[7]", {"pred": 7}),
        ("s4[7]{0:E(4)}", {"s4": 4}),
        ("u4[4,8]{1,0:T(8,128)E(4)}", {"u4": 16}),
        # Not packed: a byte each.
        ("s4[7]{0}", {"s4": 7}),
        ("c64[2]", {"c64": 16}),
        ("s64[0,3]", {}),
        ("f32[<=8,2]", {"f32": 64}),
        ("(f32[2], (bf16[2], token[]), u8[3])", {"f32": 8, "bf16": 4, "u8": 3}),
    ],
)
def test_bytes_of_types(type_text: str, sizes: dict[str, int]) -> None:
    assert {dtype: size for dtype, size in bytes_by_dtype(type_text).items() if size} == sizes


def test_an_unknown_type_is_named() -> None:
    with pytest.raises(ConfigError, match="element type 'qx9'"):
        bytes_by_dtype("qx9[3]")


def test_elements_of_types() -> None:
    assert elements("f32[2,3]{1,0:T(8,128)}") == ("f32[2,3]{1,0:T(8,128)}",)
    assert elements("((f32[2,3]{1,0:T(8,128)}, u8[]), (f32[4,3]), u32[])") == (
        "(f32[2,3]{1,0:T(8,128)}, u8[])",
        "(f32[4,3])",
        "u32[]",
    )


def test_names_and_quoted_text_mislead_nobody() -> None:
    stats = read_hlo(
        program(
            '%all-reduce.7 = f32[8] copy(%p), metadata={op_name="all-reduce(x), replica_groups={{0,1}}, calls=%body"}',
            '%q = f32[8] all-reduce(%all-reduce.7), metadata={op_name="a) replica_groups={{0,1}}"}, ' + GLOBAL,
            before=LOOP,
        ),
        8,
    )
    assert stats.counts == {"all-reduce": 1}
    assert stats.operations[0].group_size == 4


def test_the_short_form_and_lines_that_go_on_are_read() -> None:
    text = """HloModule short, num_partitions=4
add {
  x = f32[] parameter(0)
  y = f32[] parameter(1)
  ROOT sum = f32[] add(x, y)
}
main {
  p = f32[8] parameter(0)
  ROOT c = f32[8] all-reduce(p), channel_id=1,
      replica_groups={{0,1},{2,3}},
      use_global_device_ids=true, to_apply=add
}, execution_thread="main"
"""
    assert read_hlo(text, 4).wire_bytes == 32


@pytest.mark.parametrize(
    ("text", "devices", "message"),
    [
        ("", 8, "this is no HLO text"),
        ("module @jit { func.func public @main() }", 8, "this is no HLO text"),
        (program("%q = f32[8] copy(%p)"), 4, "1 replicas of 8 partitions, 8 devices; read_hlo .* devices=4"),
        (program("%q = f32[8] copy(%p)"), 0, "devices=0"),
        (program(f"%c = f32[8] all-reduce(%p), {GLOBAL}", header="HloModule m"), 4, "joins device 7; .* devices=4"),
        (program("%c = weird[8] all-reduce(%p), " + GLOBAL), 8, "element type 'weird'"),
        (program("%q = f32[8] fusion(%p), calls=%main"), 8, "calls itself: main -> main"),
    ],
)
def test_what_cannot_be_read_is_refused(text: str, devices: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_hlo(text, devices)


def test_costs_are_summed_by_kind_and_axis() -> None:
    everyone = "channel_id=2, replica_groups={}, use_global_device_ids=true, to_apply=%add"
    odd = "channel_id=3, replica_groups={{0,1},{2,3},{4,5},{6,7}}, use_global_device_ids=true, to_apply=%add"
    stats = read_hlo(
        program(
            f"%a = f32[8] all-reduce(%p), {everyone}",
            f"%b = f32[8] all-reduce(%p), {everyone}",
            f"%c = f32[80] all-gather(%p), {GLOBAL}",
            f"%d = f32[8] all-reduce(%p), {odd}",
        ),
        8,
    )
    assert stats.costs(GRID) == (
        CollectiveCost(kind="all-gather", axis="model", count=1, wire_bytes=240),
        CollectiveCost(kind="all-reduce", axis="data+model", count=2, wire_bytes=2 * 2 * 32 * 7 / 8),
        CollectiveCost(kind="all-reduce", axis="(no axis)", count=1, wire_bytes=32),
    )
    assert stats.measurement(MemoryReport(arguments=3, outputs=4, temporaries=5)) == Measurement(
        wire_bytes=240 + 112 + 32, memory_bytes=12, collectives={"all-reduce": 3, "all-gather": 1}
    )


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


BUFFERS = """BufferAssignment:
allocation 0: size 2048, parameter 0, shape |f32[32,16]| at ShapeIndex {}, maybe-live-out:
 value: <24 param.1 @0> (size=2048,offset=0): f32[32,16]{1,0}
allocation 1: size 1024, parameter 1, shape |f32[8,32]| at ShapeIndex {}:
allocation 2: size 24, output shape is |(f32[], f32[32,16])|, maybe-live-out:
allocation 3: size 4, maybe-live-out:
allocation 4: size 16, thread-local:
allocation 5: size 64, constant:
allocation 6: size 4096, preallocated-temp:
 value: <27 fusion @0> (size=4096,offset=0): f32[32,32]{1,0}

Total bytes used: 7276 (7.1KiB)
"""


def test_memory_by_what_it_is_for() -> None:
    report = read_memory_report(BUFFERS)
    assert report == MemoryReport(arguments=3072, outputs=28, temporaries=4096)
    assert report.memory_bytes == 3072 + 28 + 4096


def test_a_report_in_rounded_units() -> None:
    text = """Total bytes used: 3150848 (3.0MiB)
    2.0MiB( 66%);   1.0MiB; allocation 1: size 2.0MiB, preallocated-temp:
    3.0MiB(100%);       4B; allocation 0: size 1.5KiB, parameter 0, shape |f32[384]| at ShapeIndex {}:
allocation 1: size 2.0MiB, preallocated-temp:
allocation 0: size 1.5KiB, parameter 0, shape |f32[384]| at ShapeIndex {}:
"""
    assert read_memory_report(text) == MemoryReport(temporaries=2 * 2**20, arguments=1536)


def test_what_is_no_memory_report_is_refused() -> None:
    with pytest.raises(ConfigError, match="no memory report of XLA"):
        read_memory_report(program("%q = f32[8] copy(%p)"))


@pytest.fixture(scope="module")
def dumped(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """Modules that XLA's CPU compiler wrote for 8 devices, by name."""
    folder = tmp_path_factory.mktemp("dump")
    environment = {
        **os.environ,
        "PJRT_DEVICE": "CPU",
        "CPU_NUM_DEVICES": "8",
        "XLA_FLAGS": f"--xla_dump_to={folder} --xla_dump_hlo_as_text",
    }
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("spmd_steps.py")), str(folder)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return folder, json.loads(done.stdout.splitlines()[-1])


# Of what the compiler really wrote, by hand: kind, axis, count, result bytes, wire bytes.
BY_HAND = {
    # The gradient of a (32, 16) weight and the loss, in float32, over all 8.
    "data parallel": ("all-reduce", "data+model", 2, 4 * (32 * 16 + 1), 2 * 4 * (32 * 16 + 1) * 7 / 8),
    # Half of the (64, 32) outputs, over the 4 devices that share a batch.
    "tensor parallel": ("all-reduce", "model", 1, 4 * 32 * 32, 2 * 4 * 32 * 32 * 3 / 4),
    # An eighth of a (64, 32) tensor, of which an eighth stays.
    "all to all": ("all-to-all", "data+model", 1, 4 * 64 * 32 // 8, 4 * 64 * 32 / 8 * 7 / 8),
    # A whole (64, 32) tensor of which a quarter is there; XLA's CPU compiler sends bfloat16 as float32.
    "gather": ("all-gather", "model", 1, 4 * 64 * 32, 4 * 64 * 32 * 3 / 4),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_compiled_steps_send_what_a_calculation_by_hand_says(dumped: tuple[Path, dict[str, str]], name: str) -> None:
    folder, modules = dumped
    kind, axis, count, result, wire = BY_HAND[name]
    stats = read_hlo((folder / modules[name]).read_text(), 8)
    assert (stats.counts, stats.wire_bytes) == ({kind: count}, wire)
    assert sum(operation.bytes_by_dtype["f32"] for operation in stats.operations) == result
    assert [cost.axis for cost in stats.costs(GRID)] == [axis]


@pytest.mark.parametrize("name", BY_HAND)
def test_both_memory_reports_of_a_compiled_step_agree(dumped: tuple[Path, dict[str, str]], name: str) -> None:
    folder, modules = dumped
    stem = modules[name].removesuffix(".txt")
    exact = read_memory_report((folder / f"{stem}-buffer-assignment.txt").read_text())
    rounded = read_memory_report((folder / f"{stem}-memory-usage-report.txt").read_text())
    assert rounded.memory_bytes == pytest.approx(exact.memory_bytes, rel=0.06)


def test_memory_of_a_data_parallel_step(dumped: tuple[Path, dict[str, str]]) -> None:
    folder, modules = dumped
    stem = modules["data parallel"].removesuffix(".txt")
    report = read_memory_report((folder / f"{stem}-buffer-assignment.txt").read_text())
    # The weight, an eighth of the batch and two scalars.
    assert report.arguments == 4 * (32 * 16 + 8 * 32 + 2)


@pytest.mark.parametrize(
    ("name", "shape", "spec", "local"),
    [
        ("tensor parallel", (64, 32), ("data", None), "f32[32,32]"),
        ("tensor parallel", (32, 48), (None, "model"), "f32[32,12]"),
        ("tensor parallel", (48, 32), ("model", None), "f32[12,32]"),
        ("two axes", (64, 32), (("data", "model"), None), "f32[8,32]"),
        ("two axes", (64, 32), (("model", "data"), None), "f32[8,32]"),
    ],
)
def test_slices_lie_where_the_compiler_puts_them(
    dumped: tuple[Path, dict[str, str]], name: str, shape: tuple[int, ...], spec: tuple[str | None, ...], local: str
) -> None:
    folder, modules = dumped
    parts = slices(GRID, shape, spec)
    copies = GRID.size // len(parts)
    tiles = ",".join(str(GRID.parts(dim)) for dim in spec) + (f",{copies}" if copies > 1 else "")
    devices = ",".join(str(device) for part in parts for device in part.devices)
    written = re.escape(f"{local}{{1,0}} parameter(") + r"\d\), " + re.escape(f"sharding={{devices=[{tiles}]{devices}")
    assert re.search(written, (folder / modules[name]).read_text())
