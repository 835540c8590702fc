from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sharding.hlo_programs import GRID, program
from xla_adapters.errors import ConfigError
from xla_adapters.sharding.hlo import read_hlo
from xla_adapters.sharding.hlo_text import MemoryReport, read_memory_report
from xla_adapters.sharding.visualize import slices

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
    assert report == MemoryReport(
        arguments=3072, outputs=28, temporaries=4096, constants=64, thread_local=16, reused=2048, total=7276, exact=True
    )
    assert report.memory_bytes == 3072 + 28 + 4096


def test_a_report_in_rounded_units_is_flagged() -> None:
    text = """Total bytes used: 3150848 (3.0MiB)
    2.0MiB( 66%);   1.0MiB; allocation 1: size 2.0MiB, preallocated-temp:
    3.0MiB(100%);       4B; allocation 0: size 1.5KiB, parameter 0, shape |f32[384]| at ShapeIndex {}:
allocation 1: size 2.0MiB, preallocated-temp:
allocation 0: size 1.5KiB, parameter 0, shape |f32[384]| at ShapeIndex {}:
"""
    report = read_memory_report(text)
    assert (report.temporaries, report.arguments, report.total, report.exact) == (2 * 2**20, 1536, 3150848, False)


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
    assert stats.counts == {kind: count}
    assert stats.result_bytes == {kind: result}
    assert stats.wire_bytes == wire
    assert stats.bytes_by_dtype == {"f32": result}
    assert [cost.axis for cost in stats.costs(GRID)] == [axis]
    assert stats.exact


@pytest.mark.parametrize("name", BY_HAND)
def test_both_memory_reports_of_a_compiled_step_agree(dumped: tuple[Path, dict[str, str]], name: str) -> None:
    folder, modules = dumped
    stem = modules[name].removesuffix(".txt")
    exact = read_memory_report((folder / f"{stem}-buffer-assignment.txt").read_text())
    rounded = read_memory_report((folder / f"{stem}-memory-usage-report.txt").read_text())
    assert exact.exact
    assert exact.total == rounded.total
    # XLA states the sum of all allocations itself.
    parts = exact.arguments + exact.outputs + exact.temporaries + exact.constants + exact.thread_local
    assert parts == exact.total
    assert rounded.memory_bytes == pytest.approx(exact.memory_bytes, rel=0.06)


def test_memory_of_a_data_parallel_step(dumped: tuple[Path, dict[str, str]]) -> None:
    folder, modules = dumped
    stem = modules["data parallel"].removesuffix(".txt")
    report = read_memory_report((folder / f"{stem}-buffer-assignment.txt").read_text())
    # The weight, an eighth of the batch and two scalars; the weight's memory is given to an output.
    assert report.arguments == 4 * (32 * 16 + 8 * 32 + 2)
    assert report.reused == 4 * 32 * 16


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
