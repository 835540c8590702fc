"""What is said of a training with several graphs, and how the command is used."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.isolation import isolated
from tests.tools.trainings import LOOP, TOO_LARGE, needs_libtpu
from xla_adapters import ConfigError, cli
from xla_adapters.cli import main
from xla_adapters.hlo.cost import Cost
from xla_adapters.insight.run_report import page as report_page
from xla_adapters.tools import preflight
from xla_adapters.tools.preflight import StepOptions, report_traced
from xla_adapters.tools.preflight_report import PreflightReport, StepReport
from xla_adapters.tools.step_capture import TracedStep
from xla_adapters.tools.tpu_compiler import INSTALL, DeviceMemory, Target
from xla_adapters.tools.trace_process import Traced, _crashed


def graph(step: str, arguments: int, temporaries: int, hbm: int = 1000) -> StepReport:
    memory = DeviceMemory(arguments=arguments, outputs=0, aliased=0, temporaries=temporaries, code=0)
    return StepReport(step=step, topology="v5e:1x1", hbm_bytes=hbm, memory=memory, needed_bytes=memory.needed)


def test_the_state_of_the_training_stays_while_it_evaluates() -> None:
    training, evaluation = graph("training step", 600, 100), graph("evaluation step", 200, 300)
    both = PreflightReport(what="train.py", topology="v5e:1x1", graphs=(training, evaluation))
    assert (both.needed_bytes, both.fits, both.status) == (900, True, 0)
    assert both.text().startswith("train.py on v5e:1x1\nFITS: 900 B of 1.00 kB on each device, with 2 graphs")
    # Each fits alone.
    larger = PreflightReport(what="", topology="", graphs=(training, graph("evaluation step", 200, 500)))
    assert all(item.fits for item in larger.graphs)
    assert (larger.needed_bytes, larger.fits, larger.status) == (1100, False, 1)
    assert larger.verdict.startswith("DOES NOT FIT: 1.10 kB")
    values = json.loads(json.dumps(both.as_values()))
    assert (values["fits"], values["needed_bytes"], len(values["graphs"])) == (True, 900, 2)


def test_a_graph_that_is_refused_is_the_verdict() -> None:
    refused = StepReport(step="training step", topology="v5e:1x1", problem="no such operation")
    found = PreflightReport(what="", topology="", graphs=(refused,))
    assert (found.verdict, found.status) == ("DOES NOT COMPILE: see the graphs below", 2)
    fits, larger = graph("training step", 600, 100), graph("training step", 600, 600)
    # That one graph fits says nothing of the one that was not compiled; that one does not fit is known.
    assert PreflightReport(what="", topology="", graphs=(fits, refused)).status == 2
    assert PreflightReport(what="", topology="", graphs=(fits,), problem="the evaluation failed").status == 2
    assert PreflightReport(what="", topology="", graphs=(larger, refused)).status == 1
    failed = PreflightReport(what="", topology="", problem="ValueError: no (train.py:3)")
    assert failed.verdict == "NOT COMPILED: ValueError: no (train.py:3)"
    assert (failed.fits, failed.status, failed.needed_bytes) == (None, 2, 0)
    assert (refused.fits, PreflightReport(what="", topology="", graphs=(larger, refused)).fits) == (None, False)


def test_a_model_of_which_no_plan_fits_is_compiled_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def compiled(load: Any, options: StepOptions, *others: Any) -> PreflightReport:
        if options.sharding == "auto":
            raise ConfigError("memory_budget=1 bytes per device is too little")
        step = StepReport(step=str(options.sharding), topology="v5e:1x1", problem="ran out", out_of_memory=True)
        return PreflightReport(what="net", topology="v5e:1x1", graphs=(step,))

    monkeypatch.setattr(preflight, "_preflight_model", compiled)
    found = preflight.preflight_model(lambda *_: None, StepOptions(name="net", rows=4), Target.parse("v5e:1x1"))  # type: ignore[arg-type,return-value]
    assert (found.fits, found.status) == (False, 1)
    assert "too little" in found.text()
    assert "None of these fits" in found.text()


def test_pages_have_the_graphs_and_no_markup_of_the_script() -> None:
    found = PreflightReport(
        what="train.py --name <b>", topology="v5e:1x1", graphs=(graph("training step", 600, 100),), notes=("<i>",)
    )
    text = found.page()
    assert "<b>" not in text.partition("<body>")[2]
    assert "<i>" not in text
    assert "FITS: 700 B" in text
    assert "training step" in text
    empty: dict[str, Any] = {
        **{name: {} for name in ("about", "rates", "wall", "counts", "memory")},
        **{name: [] for name in ("compiles", "programs", "checkpoints", "transfers", "shapes")},
        **{
            "steps": {"steps": 0, "slow": []},
            "wall_seconds": 1.0,
            "host_cpu_seconds": 0.0,
            "plan": "",
            "transfers_looked_at": 0,
        },
    }
    assert "Pre-flight" not in report_page(empty, [])
    assert "<h2>Pre-flight for v5e:1x1</h2><p><b>FITS: 700 B" in report_page(empty, [], found)


def test_without_libtpu_there_is_an_estimate_and_the_install_line(monkeypatch: pytest.MonkeyPatch) -> None:
    cost = Cost(operations=1, inputs=1, outputs=1, input_bytes=0, output_bytes=0, flops=3 * 10**12)
    monkeypatch.setattr(preflight, "cost_of", lambda module: cost)
    monkeypatch.setattr("xla_adapters.tools.tpu_compiler.util.find_spec", lambda name: None)
    target = Target.parse("v5e:1x1")
    missing = preflight._missing_compiler(target)
    assert INSTALL in missing
    step = TracedStep(module=b"", names={}, seconds=1.0, argument_bytes=3_000_000)
    found = report_traced("train.py", target, Traced(steps=[step]), timeout=1, missing=missing)
    assert (found.fits, found.status) == (None, 2)
    text = found.text()
    assert INSTALL in text
    assert "training step    3.00 MB       3e+12" in text


def test_a_training_on_one_device_is_not_compiled_for_several() -> None:
    step = TracedStep(module=b"", names={}, seconds=1.0)
    found = report_traced("train.py", Target.parse("v5e:2x4"), Traced(steps=[step]), timeout=1)
    assert (found.status, found.graphs) == (2, ())
    assert "uses one device, and v5e:2x4 has 8: shard it" in found.problem


def test_a_crash_is_said_with_the_line_of_the_script() -> None:
    said = (
        "epoch 1\nFatal Python error: Segmentation fault\n\nCurrent thread 0x1 (most recent call first):\n"
        f'  File "{torch.__file__}", line 5 in norm\n  File "/home/me/train.py", line 12 in main\n'
        '  File "/home/me/train.py", line 20 in <module>\n\nExtension modules: numpy (total: 1)\n'
    )
    found = _crashed(said)
    assert found.startswith(" (Segmentation fault) at /home/me/train.py:12; in a pre-flight tensors have no values")
    assert _crashed("epoch 1\n") == ""


@isolated
def test_wrong_use_of_the_command(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    train = tmp_path / "train.py"
    train.touch()
    start = ["preflight", "--topology", "v5e:1x1"]
    for arguments, message in (
        ([], "give the script to preflight, or -m and a module"),
        ([str(tmp_path / "none.py")], "there is no file"),
        (["--model", "a:b", str(train)], "give a script or --model, not both"),
        (["--model", "a:b"], "--model needs --batch"),
        (["--batch", "8", str(train)], "--batch is for --model; a script has its own"),
        (["--gradient-checkpointing", str(train)], "--gradient-checkpointing is for --model"),
        (["--sharding", "plan.json", str(train)], "for a script give one of auto, dp"),
    ):
        assert main([*start, *arguments]) == 2
        assert message in capfd.readouterr().err


@isolated
def test_what_cannot_take_effect_is_refused_at_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    start = ["preflight", "--topology", "v5e:1x1", "--model", "a:b", "--batch", "8"]
    for arguments, message in (
        (["--timeout", "0"], "'0' is not a number above 0"),
        (["--timeout", "inf"], "'inf' is not a number above 0"),
        (["--json", str(tmp_path)], "cannot be written"),
        (["--html", str(tmp_path / "none" / "report.html")], "cannot be written"),
        (["--batch", "8x16x2"], "is not the number of samples and their length"),
    ):
        with pytest.raises(SystemExit) as ended:
            main([*start, *arguments])
        assert ended.value.code == 2
        assert message in capfd.readouterr().err


def test_an_interrupt_ends_a_command_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "explained", interrupted)
    assert main(["explain"]) == 130
    assert capsys.readouterr().err == "xla-adapters: interrupted\n"


def test_a_signal_leaves_no_process_and_no_folder(tmp_path: Path) -> None:
    train, scratch = tmp_path / "train.py", tmp_path / "scratch"
    scratch.mkdir()
    began = tmp_path / "began"
    train.write_text(
        f"import os, pathlib, time\npathlib.Path({str(began)!r}).write_text(str(os.getpid()))\ntime.sleep(600)\n"
    )
    program = (
        "import sys; from xla_adapters.tools import preflight; from xla_adapters.cli import main; "
        "preflight._missing_compiler = lambda target: 'none'; "
        f"sys.exit(main(['preflight', '--topology', 'v5e:1x1', {str(train)!r}]))"
    )
    command = [sys.executable, "-c", program]
    process = subprocess.Popen(command, env={**os.environ, "TMPDIR": str(scratch)}, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 300
        while not (began.is_file() and began.read_text()) and time.monotonic() < deadline:
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 128 + signal.SIGTERM
    assert not Path(f"/proc/{began.read_text()}").exists()
    assert not list(scratch.glob("xla-adapters-*"))


@needs_libtpu
@pytest.mark.slow
@isolated(timeout=500)
def test_the_command_compiles_a_script(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    train = tmp_path / "train.py"
    train.write_text(LOOP)
    written = {form: tmp_path / f"report.{form}" for form in ("json", "html")}
    options = [part for form, path in written.items() for part in (f"--{form}", str(path))]
    assert main(["preflight", "--topology", "v5e:1x1", *options, str(train)]) == 0
    printed = capfd.readouterr().out
    assert f"{train} on v5e:1x1\nFITS: " in printed
    assert "the loss is" not in printed
    values = json.loads(written["json"].read_text())
    assert values["fits"]
    (found,) = values["graphs"]
    # Parameters and the two averages of AdamW, and the batch.
    assert found["memory"]["arguments"] >= 3 * 4 * (128 * 256 + 256 + 256 * 8 + 8) + 4 * 16 * 128
    assert found["flops"] >= 2 * 16 * (2 * 128 * 256 + 3 * 256 * 8)
    assert "FITS: " in written["html"].read_text()


@needs_libtpu
@pytest.mark.slow
@isolated(timeout=500)
def test_a_script_that_does_not_fit_is_refused_with_its_lines(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    train = tmp_path / "train.py"
    train.write_text(TOO_LARGE)
    assert main(["preflight", "--topology", "v5e:1x1", "--json", str(tmp_path / "a.json"), str(train)]) == 1
    assert f"{train} on v5e:1x1\nDOES NOT FIT: " in capfd.readouterr().out
    (found,) = json.loads((tmp_path / "a.json").read_text())["graphs"]
    assert found["out_of_memory"]
    # The hidden layer or its gradient is more than the device has.
    line = dict(enumerate(TOO_LARGE.splitlines(), 1))
    forward = next(number for number, text in line.items() if "hidden = " in text)
    backward = next(number for number, text in line.items() if "backward()" in text)
    too_large = [item for item in found["largest"] if item["bytes"] >= 2 * 2**17 * 2**17]
    assert too_large
    for item in too_large:
        made_in = backward if item["name"].endswith(" in the backward") else forward
        assert item["line"] == f"{train}:{made_in}"
    names = {item["name"] for item in found["largest"]}
    assert {"0.weight", "exp_avg of 0.weight", f"copied at {train}:{forward}"} <= names
