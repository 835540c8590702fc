from __future__ import annotations

import pytest

from tests.sharding.hlo_programs import GLOBAL, GRID, program, the_only
from xla_adapters.errors import ConfigError
from xla_adapters.sharding import CollectiveCost, Measurement
from xla_adapters.sharding.hlo import HloStats, read_hlo, ring_wire_bytes
from xla_adapters.sharding.hlo_text import MemoryReport, bytes_by_dtype, elements


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
    stats = read_hlo(program(line), 8)
    assert stats.counts == {kind: 1}
    assert stats.result_bytes == {kind: result}
    assert stats.wire_bytes_by_kind == {kind: wire}
    assert stats.wire_bytes == wire
    assert stats.bytes_by_dtype == {"f32": result}
    assert stats.exact
    assert {cost.axis for cost in stats.costs(GRID)} == {"model"}


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
    stats = read_hlo(program(start, f"ROOT %d = f32[32] {done}"), 8)
    assert stats.counts == {kind: 1}
    assert stats.result_bytes == {kind: result}


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
    assert stats.counts == {"all-reduce": 12}
    assert stats.result_bytes == {"all-reduce": 12 * 4096}
    assert stats.bytes_by_dtype == {"f32": 12 * 4096}
    assert stats.wire_bytes == 12 * 2 * 4096 * 3 / 4
    assert stats.costs(GRID)[0].count == 12
    assert stats.exact


def test_a_loop_in_a_loop_multiplies_twice() -> None:
    outer = f"""%outer (t: (s32[], f32[32,32])) -> (s32[], f32[32,32]) {{
  %t = (s32[], f32[32,32]) parameter(0)
  ROOT {WHILE.replace("%p", "%t")}, backend_config={{"known_trip_count":{{"n":"3"}}}}
}}
"""
    line = "%o = (s32[], f32[32,32]) while(%p), condition=%condition, body=%outer, "
    stats = read_hlo(program(line + 'backend_config={"known_trip_count":{"n":"5"}}', before=LOOP + outer), 8)
    assert stats.counts == {"all-reduce": 15}


def test_a_loop_of_unknown_length_counts_once_and_says_so() -> None:
    stats = read_hlo(program(WHILE, before=LOOP), 8)
    assert stats.counts == {"all-reduce": 1}
    assert not stats.exact


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
    assert (stats.counts, stats.exact) == ({"collective-permute": 4}, True)


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
    assert (stats.counts, stats.exact) == ({"collective-permute": 1}, False)


def test_a_branch_that_may_not_be_taken_is_counted_and_flagged() -> None:
    line = "%b = f32[32,32] conditional(%p, %p, %p), branch_computations={%body, %condition}"
    stats = read_hlo(program(line, before=LOOP), 8)
    assert (stats.counts, stats.exact) == ({"all-reduce": 1}, False)


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


def test_what_has_no_formula_is_named() -> None:
    stats = read_hlo(program("%r = f32[8] ragged-all-to-all(%p), replica_groups={{0,1}}"), 8)
    assert stats.uncosted == {"ragged-all-to-all": 1}
    assert stats.operations == ()


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
    assert stats.measurement(MemoryReport(arguments=3, outputs=4, temporaries=5, constants=100)) == Measurement(
        wire_bytes=240 + 112 + 32, memory_bytes=12, collectives={"all-reduce": 3, "all-gather": 1}
    )
