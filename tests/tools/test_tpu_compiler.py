"""libtpu compiles for slices that are not there; without it the message says how to install it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.isolation import isolated
from tests.tools.trainings import WIDTH, Net, needs_libtpu, plan_of, traced_step
from xla_adapters.cli import main
from xla_adapters.errors import ConfigError
from xla_adapters.tools.preflight import check_target, report_on
from xla_adapters.tools.preflight_report import Attempt, PreflightReport, StepReport
from xla_adapters.tools.tpu_compiler import (
    Compiler,
    Target,
    check_compiler,
    compile_module,
    largest_values,
    memory_of,
)

ON_FOUR = {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "4", "XLA_HLO_DEBUG": "1", "XLA_IR_DEBUG": "1"}
PARAMETERS = sum(parameter.numel() for parameter in Net().parameters())


def test_slices_are_read_and_counted() -> None:
    assert Target.parse("v5e:2x4") == Target(generation="v5e", chips=(2, 4))
    assert str(Target.parse("V5P:2x2x4")) == "v5p:2x2x4"
    assert [Target.parse(name).devices for name in ("v5e:2x4", "v4:2x2x1", "tpu7x:2x2x1")] == [8, 4, 8]
    usual = [("v5e", 4), ("v5e", 8), ("v6e", 16), ("v5p", 4), ("v5p", 8), ("v4", 16), ("v5p", 32), ("tpu7x", 8)]
    slices = ["v5e:2x2", "v5e:2x4", "v6e:4x4", "v5p:2x2x1", "v5p:2x2x2", "v4:2x2x4", "v5p:2x4x4", "tpu7x:2x2x1"]
    assert [str(Target.usual(*which)) for which in usual] == slices
    with pytest.raises(ConfigError, match="there is no usual slice of 6 devices of v5e: name one"):
        Target.usual("v5e", 6)
    for wrong in ("v5e", "v9:2x2", "v5e:2x", "v5e-8"):
        with pytest.raises(ConfigError, match="give the generation and the chips along each dimension"):
            Target.parse(wrong)
    for name, meant in (("v5litepod-8", "v5e:2x4"), ("v6e-16", "v6e:4x4"), ("v5p-8", "v5p:2x2x1")):
        with pytest.raises(ConfigError, match=f"{name} is usually {meant}"):
            Target.parse(name)
    assert Target.parse("v6e:3x3").usual_slices.startswith("v6e:1x1, v6e:2x2, v6e:2x4, v6e:4x4, ")
    assert Target.parse("v5p:3x3x3").usual_slices.startswith("v5p:2x2x1, v5p:2x2x2, v5p:2x2x4, ")
    with pytest.raises(ConfigError, match="a slice of v5p has 3 dimensions, as in v5p:2x2x1"):
        Target.parse("v5p:2x4")


def test_without_libtpu_the_install_line_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xla_adapters.tools.tpu_compiler.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r'libtpu and pypjrt is not installed: pip install "xla-adapters\[preflight'):
        Compiler.find()


@needs_libtpu
@pytest.mark.parametrize("name", ["v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"])
def test_libtpu_knows_the_slices(name: str) -> None:
    target = Target.parse(name)
    found = check_compiler(target)
    assert (found.problem, found.devices) == ("", target.devices)
    assert found.hbm_bytes > 15e9
    assert found.memory is None


@needs_libtpu
def test_a_slice_that_libtpu_does_not_know_is_refused_with_the_usual_ones() -> None:
    with pytest.raises(ConfigError, match=r"v5e:3x3: libtpu .* says: .*; usual slices: v5e:1x1, v5e:2x2, v5e:2x4,"):
        check_target(Target.parse("v5e:3x3"))


@needs_libtpu
@isolated(env=ON_FOUR)
def test_the_compiled_step_has_the_expected_memory_and_collectives() -> None:
    given = {scheme: traced_step(scheme, 4, 1) for scheme in ("dp", "fsdp")}
    target = Target.parse("v5e:2x2")
    found = {scheme: compile_module(step.module, target) for scheme, step in given.items()}
    for compiled in found.values():
        assert compiled.problem == ""
        assert compiled.memory is not None
        # Multiplications of the two layers, forward and backward (the inputs need no gradient), and little else.
        assert compiled.flops > 5 * 2 * 16 / 4 * 4 * WIDTH**2
        # Updates take the place of what they update; only the loss is new.
        assert 0 < compiled.memory.outputs - compiled.memory.aliased < 2048
    mesh = plan_of("dp", 4, 1).mesh
    dp, fsdp = (report_on(scheme, given[scheme], found[scheme], mesh) for scheme in ("dp", "fsdp"))
    assert dp.memory is not None
    assert fsdp.memory is not None
    # Parameters and the two averages of AdamW, whole and in quarters, with the batch and padding.
    assert 12 * PARAMETERS < dp.memory.arguments < 12 * PARAMETERS + 20_000
    assert 3 * PARAMETERS < fsdp.memory.arguments < 3 * PARAMETERS + 20_000
    # All gradients in float32 around a ring of 4.
    assert 2 * 4 * PARAMETERS * 3 / 4 <= dp.wire_bytes < 2 * 4 * PARAMETERS * 3 / 4 + 1000
    assert {item.kind for item in fsdp.collectives} >= {"all-gather"}
    assert {item.axis for item in fsdp.collectives} == {"data"}
    assert dp.largest[0].name in {
        f"{kind}{name}.weight" for kind in ("", "exp_avg of ", "exp_avg_sq of ") for name in ("up", "down")
    }
    text = dp.text()
    assert text.startswith("dp on v5e:2x2\nFITS: ")
    assert f"Batch of all devices: inputs 16x{WIDTH}, labels 16\n" in text
    assert f"libtpu {Compiler.find().version}" in text
    assert dp.time is not None
    assert dp.time.least <= dp.time.most
    json.dumps(dp.as_values())


@needs_libtpu
@isolated(env=ON_FOUR)
def test_what_the_compiler_refuses_is_a_problem() -> None:
    target = Target.parse("v5e:2x2")
    assert "HloModuleProto" in compile_module(b"nonsense", target).problem
    other = compile_module(traced_step("fsdp", 4, 1).module, Target.parse("v5e:2x4"))
    assert "should have 8 devices but has 4" in other.problem
    assert not other.out_of_memory
    assert compile_module(b"", target, timeout=0.01).problem == "the compiler had no more than 0.01 s (its timeout)"


@needs_libtpu
@isolated(env=ON_FOUR)
def test_a_step_that_does_not_fit_is_refused_with_the_largest_values() -> None:
    rows = 2**25
    step = traced_step("fsdp", 4, 1, rows=rows)
    compiled = compile_module(step.module, Target.parse("v5e:2x2"))
    assert compiled.out_of_memory
    report = report_on("too large", step, compiled, plan_of("fsdp", 4, 1).mesh)
    assert not report.fits
    # The hidden layer of the samples of one device is 17 GB in float32, more than the device has.
    assert report.needed_bytes > 4 * rows / 4 * 4 * WIDTH
    assert f"f32[{rows // 4},{4 * WIDTH}]" in {item.shape for item in report.largest}
    assert "DOES NOT FIT: about" in report.text()


BUFFERS = """BufferAssignment:
allocation 0: size 4096, page 0, parameter 3, shape |f32[32,32]| at ShapeIndex {}:
 value: <1 param @0> (size=4096,offset=0): f32[32,32]{1,0:T(8,128)}
allocation 1: size 9999, color 1, page 0, preallocated-temp:
 value: <2 on_chip @1> (size=9999,offset=0): f32[32,32]{1,0:T(8,128)S(1)}
allocation 2: size 8192, page 0, preallocated-temp:
 value: <3 fusion.1 @0> (size=8192,offset=0): f32[64,32]{1,0:T(8,128)}
"""
TEXT = """HloModule step

FileNames
1 "/home/me/train.py"
2 "/site-packages/torch/nn/modules/module.py"

FunctionNames
1 "main"

FileLocations
1 {file_name_id=1 function_name_id=1 line=12 end_line=0 column=0 end_column=0}
2 {file_name_id=2 function_name_id=1 line=99 end_line=0 column=0 end_column=0}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}

%fusion.1 = f32[64,32]{1,0:T(8,128)} fusion(%a), metadata={op_type="aten__mm" op_name="aten__mm" source_file="/site-packages/torch/nn/modules/module.py" source_line=99 stack_frame_id=2}
"""  # noqa: E501


def test_values_are_named_by_the_line_that_made_them() -> None:
    assert memory_of(BUFFERS) == (4096, 8192)
    temporary, argument = largest_values(TEXT, BUFFERS, {3: "up.weight"})
    assert (temporary.name, temporary.bytes, temporary.line) == ("mm", 8192, "/home/me/train.py:12")
    assert (argument.name, argument.shape, argument.kind) == ("up.weight", "f32[32,32]", "argument")


@needs_libtpu
@pytest.mark.slow
@isolated(timeout=550)
def test_the_command(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    written = tmp_path / "report.json"
    arguments = ["preflight", "--model", "tests.tools.trainings:factory", "--topology", "v5e:2x2"]
    assert main([*arguments, "--batch", "16", "--json", str(written), "--dtype", "bf16-mixed"]) == 0
    assert json.loads(written.read_text())["fits"]
    assert "FITS: " in capfd.readouterr().out
    assert main([*arguments, "--batch", str(2**24), "--sharding", "fsdp"]) == 1
    printed = capfd.readouterr().out
    assert "DOES NOT FIT" in printed
    # The line of the model that made what does not fit.
    assert "trainings.py:" in "".join(printed.split())
    assert "gradient_checkpointing_enable()" in printed
    attempts = printed[printed.index("What was tried instead") :]
    assert attempts.count("  fits") == 1
    assert main([*arguments, "--batch", "6", "--sharding", "dp"]) == 2
    assert "does not divide" in capfd.readouterr().err


@needs_libtpu
@isolated
def test_options_of_the_command_are_checked(capfd: pytest.CaptureFixture[str]) -> None:
    arguments = ["preflight", "--model", "tests.tools.trainings:factory", "--batch", "16"]
    assert main([*arguments, "--topology", "v5e:3"]) == 2
    assert main([*arguments, "--topology", "v5e:2x2", "--sharding", "nothing"]) == 2
    printed = capfd.readouterr().err
    assert "a slice of v5e has 2 dimensions" in printed
    assert "--sharding nothing: give one of auto, dp" in printed


@pytest.mark.parametrize(("found", "left"), [(1, True), (2, False)])
def test_a_report_says_what_is_left_if_no_variant_fits(found: int, left: bool) -> None:
    tried = (Attempt(change="sharding fsdp", fits=False, needed_bytes=2000), Attempt(change="bf16-mixed", fits=True))
    step = StepReport(step="net", topology="v5e:2x2", problem="Ran out of memory", out_of_memory=True)
    report = PreflightReport(what="net", topology="v5e:2x2", graphs=(step,), attempts=tried[:found])
    assert report.status == 1
    assert ("None of these fits: use a larger slice" in report.text()) == left


def test_a_step_without_a_program_says_why() -> None:
    report = StepReport(step="net", topology="v5e:2x2", problem="no such operation")
    assert report.fits is None
    assert report.text() == "net on v5e:2x2\nDOES NOT COMPILE: no such operation"
