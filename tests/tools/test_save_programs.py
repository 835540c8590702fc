"""Programs that a pre-flight has saved are those that a run on the slice asks for: it compiles nothing.

There is no TPU here. The run is one of torch_xla for a TPU (`PJRT_DEVICE=TPU`), with a plugin for the CPU in libtpu's
place (`tests/plugin_platform/tpu_shim.c`).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import shutil
import struct
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest
import torch

from tests.isolation import isolated
from tests.private_apis import ROOT
from tests.tools.trainings import needs_libtpu
from xla_adapters import CompiledStep, ConfigError, UnsupportedOptionError
from xla_adapters.cli import main
from xla_adapters.runtime import compile_cache
from xla_adapters.tools import libtpu_process, save_programs
from xla_adapters.tools.preflight_report import PreflightReport, SavedPrograms
from xla_adapters.tools.tpu_compiler import Compiler, Target
from xla_adapters.tools.trace_process import Request

_PLUGIN = Path(str(files("xla_plugins.xla_cpu_pjrt")))
_ROOM = Path(compile_cache.__file__).parent
_ONE, _EIGHT = Target.parse("v5e:1x1"), Target.parse("v5e:2x4")

HF = """
import sys, tempfile
from hf_trainer import Trainer
from tests.runtime.warm_trainings import arguments, model, rows
import xla_adapters

xla_adapters.initialize(spmd="fsdp" in sys.argv or "auto" in sys.argv)
options = {"sharding": "fsdp"} if "fsdp" in sys.argv else {"auto_sharding": True} if "auto" in sys.argv else {}
with tempfile.TemporaryDirectory() as folder:
    trainer = Trainer(
        model(1, 32), arguments(folder, max_steps=4, logging_steps=2), train_dataset=rows(), eval_dataset=rows(16),
        **options,
    )
    if "ahead" in sys.argv:
        print(trainer.preflight("v5e:1x1", save_programs=sys.argv[-1]).programs)
    else:
        trainer.train()
        trainer.evaluate()
"""

LIGHTNING = """
import sys
import lightning as L
import torch
from torch.utils.data import DataLoader
from lightning_strategy import XLAEagerStrategy

class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Dropout(0.1), torch.nn.Linear(64, 8))

    def training_step(self, batch, index):
        loss = self.layers(batch).square().mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, index):
        self.log("val_loss", self.layers(batch).square().mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

torch.manual_seed(0)
data = DataLoader(torch.randn(32, 16), batch_size=8)
shards = {"sharding": "fsdp"} if "fsdp" in sys.argv else {"auto_sharding": True} if "auto" in sys.argv else {}
strategy = XLAEagerStrategy(**shards)
trainer = L.Trainer(
    strategy=strategy, max_epochs=2, logger=False, enable_checkpointing=False, enable_progress_bar=False
)
if "ahead" in sys.argv:
    print(strategy.preflight(trainer, Module(), data, data, topology="v5e:1x1", save_programs=sys.argv[-1]).programs)
else:
    trainer.fit(Module(), data, data)
"""

# The host has a TPU, as far as torch_xla looks for one; its libtpu is of the build of argument 2, if there is one.
_RUN = """
import glob, json, runpy, sys
from pathlib import Path

found, (vendor, build, *command) = glob.glob, sys.argv[1:]
glob.glob = lambda pattern, *args, **options: (
    [vendor] if pattern.startswith("/sys/bus/pci") else found(pattern, *args, **options)
)
from xla_adapters.runtime.compile_cache import library

of_file = library._build_of
library._build_of = lambda plugin: of_file(Path(build or plugin))
sys.argv = command
runpy.run_path(sys.argv[0], run_name="__main__")
from xla_adapters import get_runtime

metrics = get_runtime().counters.metrics()
print(json.dumps([metrics.compiles, metrics.eager_compiles, metrics.loads, library.COMPILE_CACHE.counts().problem]))
"""


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library in libtpu's place."""
    compiler = shutil.which("cc") or pytest.skip("no C compiler")
    library = tmp_path_factory.mktemp("shim") / "shim.so"
    options = ["-shared", "-fPIC", "-O1", "-Wall", "-Werror", f"-I{_PLUGIN / 'include'}"]
    source = ROOT / "tests" / "plugin_platform" / "tpu_shim.c"
    target = f'-DTARGET="{_PLUGIN / "xla_cpu_pjrt.so"}"'
    subprocess.run([compiler, *options, target, str(source), "-o", str(library), "-ldl"], check=True)
    return library


def _script(folder: Path, text: str) -> Path:
    path = folder / "train.py"
    path.write_text(text)
    return path


def _run(script: Path, options: list[str], target: Target, shim: Path, cache: Path, **more: str) -> list[int | str]:
    """Trains as on the slice; returns how many graphs and operations were compiled, and how many programs loaded."""
    host = script.parent / "pci"
    host.mkdir(exist_ok=True)
    (host / "vendor").write_text("0x1ae0\n")
    (host / "device").write_text("0x0063\n")
    build = more.pop("build", "")
    bounds = ",".join(map(str, (*target.chips, 1)))
    env = {
        **{name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")},
        "PYTHONPATH": os.pathsep.join(entry for entry in (str(ROOT), *sys.path) if entry),
        "PJRT_DEVICE": "TPU",
        "TPU_LIBRARY_PATH": str(shim),
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_ID": "0",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_ACCELERATOR_TYPE": target.accelerator,
        "TPU_PROCESS_BOUNDS": "1,1,1",
        "TPU_CHIPS_PER_PROCESS_BOUNDS": bounds,
        "SHIM_DEVICES": str(target.devices),
        "XLA_ADAPTERS_CACHE_DIR": str(cache),
        **more,
    }
    command = [sys.executable, "-c", _RUN, str(host / "vendor"), build, str(script), *options]
    done = subprocess.run(command, cwd=script.parent, env=env, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout[-3_000:] + done.stderr[-5_000:]
    found: list[int | str] = json.loads(done.stdout.splitlines()[-1])
    return found


def _without_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a shell; the tests' own flags are for CPU devices."""
    monkeypatch.setattr(save_programs, "_initial_environment", lambda: [])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "options", "target"),
    [
        pytest.param(HF, [], _ONE, id="hf", marks=pytest.mark.long),
        pytest.param(HF, ["fsdp"], _EIGHT, id="hf-fsdp", marks=pytest.mark.long),
        pytest.param(HF, ["auto"], _EIGHT, id="hf-auto", marks=pytest.mark.long),
        pytest.param(LIGHTNING, [], _ONE, id="lightning", marks=pytest.mark.long),
        pytest.param(LIGHTNING, ["fsdp"], _EIGHT, id="lightning-fsdp"),
        pytest.param(LIGHTNING, ["auto"], _EIGHT, id="lightning-auto", marks=pytest.mark.long),
    ],
)
def test_a_run_compiles_nothing(
    script: str, options: list[str], target: Target, shim: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _without_flags(monkeypatch)
    monkeypatch.setenv("SHIM_DEVICES", str(target.devices))
    monkeypatch.setattr(Compiler, "find", classmethod(lambda cls: cls(library=shim, version="0")))
    train = _script(tmp_path, script)
    folder = save_programs.check_saving(target, tmp_path / "programs")
    request = Request(generation="v5e", command=[str(train), *options])
    saved = save_programs.save_programs(request, target, folder, timeout=400)
    assert saved.is_complete, str(saved)
    assert saved.saved > 3
    plans = list((folder / "sharding_plans").glob("*"))
    assert len(plans) == ("auto" in options)
    compiles, eager, loads, problem = _run(train, options, target, shim, folder)
    assert (compiles, eager, problem) == (0, 0, "")
    assert 0 < int(loads) <= saved.saved
    # The run has found the plan: another digest would be another file.
    assert list((folder / "sharding_plans").glob("*")) == plans


# libtpu's report on the steps is left out: the library in its place cannot tell about a slice.
_AHEAD = """
import runpy, sys
from pathlib import Path
from xla_adapters.tools import preflight
from xla_adapters.tools.tpu_compiler import Compiler

shim, *sys.argv = sys.argv[1:]
Compiler.find = lambda: Compiler(library=Path(shim), version="0")
preflight._missing_compiler = lambda target: ""
preflight.report_traced = lambda what, target, traced, **options: preflight.PreflightReport(
    what=what, topology=str(target), problem=traced.problem
)
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "script", [pytest.param(HF, id="hf"), pytest.param(LIGHTNING, id="lightning", marks=pytest.mark.long)]
)
def test_a_trainer_saves_the_programs_of_its_run(script: str, shim: Path, tmp_path: Path) -> None:
    """From a process on CPU devices, whose flags are others."""
    train, folder = _script(tmp_path, script), tmp_path / "programs"
    command = [sys.executable, "-c", _AHEAD, str(shim), str(train), "ahead", str(folder)]
    environment = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")}
    environment |= {"SHIM_DEVICES": "1", "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), *sys.path)))}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert done.stdout.splitlines()[-1].startswith("SAVED "), done.stdout[-3_000:] + done.stderr[-3_000:]
    compiles, eager, loads, problem = _run(train, [], _ONE, shim, folder)
    assert (compiles, eager, problem) == (0, 0, "")
    assert int(loads) > 0


_DESCRIBE = """
#include "%s"

// Prints what the plugin in a library says of a slice, each text with a zero byte: as tpu_shim.c reads it.
static void print(int function, const void* object) {
  struct text_args args = {.size = sizeof args, .object = object};
  if (!went_well(wrapped->functions[function](&args), "")) exit(1);
  fwrite(args.text, 1, args.length, stdout);
  putchar(0);
}

int main(int count, char** arguments) {
  int64_t chips[3] = {atoi(arguments[3]), atoi(arguments[4]), atoi(arguments[5])};
  cache_wrap(arguments[1], "", count - count);
  if (!GetPjrtApi()) return 1;
  const void* topology = create_topology(arguments[2], chips, NULL);
  struct descriptions_args devices = {.size = sizeof devices, .topology = topology};
  if (!topology || !went_well(wrapped->functions[TOPOLOGY_DEVICE_DESCRIPTIONS](&devices), "")) return 1;
  printf("%%d", wrapped->minor);
  putchar(0);
  print(TOPOLOGY_PLATFORM_NAME, topology);
  print(TOPOLOGY_PLATFORM_VERSION, topology);
  for (size_t i = 0; i < devices.count; i++) {
    print(DEVICE_DESCRIPTION_KIND, devices.descriptions[i]);
    print(DEVICE_DESCRIPTION_TO_STRING, devices.descriptions[i]);
  }
  fflush(stdout);
  _exit(0);
}
"""


def _answers_of_libtpu(target: Target, folder: Path) -> Path:
    compiler, program = shutil.which("cc") or pytest.skip("no C compiler"), folder / "describe"
    program.with_suffix(".c").write_text(_DESCRIBE % (_ROOM / "plugin.c"))
    subprocess.run([compiler, str(program.with_suffix(".c")), "-o", str(program), "-ldl"], check=True)
    chips = [str(number) for number in (*target.chips, 1)]
    command = [str(program), str(Compiler.find().library), str(target), *chips]
    environment = save_programs.environment_of_compiler("", "")
    done = subprocess.run(command, env=environment, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr.decode()[-2_000:]
    answers = folder / "answers"
    answers.write_bytes(done.stdout)
    assert done.stdout.count(b"\0") == 3 + 2 * target.devices
    return answers


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "options", "target"),
    [pytest.param(HF, ["fsdp"], _EIGHT, id="hf-fsdp"), pytest.param(LIGHTNING, [], _ONE, id="lightning")],
)
def test_libtpus_programs_have_the_names_that_a_run_looks_for(
    script: str, options: list[str], target: Target, shim: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run's device answers as libtpu does, and writes what it compiles: under the names of what libtpu compiled.

    That libtpu loads its programs is not shown: PJRT loads a program into a client only, and libtpu makes none without
    a TPU.
    """
    _without_flags(monkeypatch)
    folder = save_programs.check_saving(target, tmp_path / "programs")
    request = Request(generation="v5e", command=[str(_script(tmp_path, script)), *options])
    saved = save_programs.save_programs(request, target, folder, timeout=400)
    assert saved.is_complete, str(saved)
    assert main(["cache", "verify", str(folder)]) == 0
    answers, asked = _answers_of_libtpu(target, tmp_path), tmp_path / "asked"
    build = str(Compiler.find().library)
    compiles, eager, _, problem = _run(
        tmp_path / "train.py", options, target, shim, asked, SHIM_ANSWERS=str(answers), build=build
    )
    assert (int(compiles) + int(eager), problem) == (saved.saved, "")
    names = [{entry.path.name for entry in compile_cache.entries(path)} for path in (asked, folder)]
    assert names[0] == names[1]


def _record(folder: Path, form: bytes, code: bytes) -> str:
    """As plugin.c records a program; returns its name."""
    data = struct.pack("=3Q", len(form), 0, len(code)) + form + code
    digest = hashlib.sha256(data).digest()
    path = folder / digest.hex()
    path.write_bytes(struct.pack("=8s32sQ32s", b"XLAPROG1", digest, len(data), digest) + data)
    path.chmod(0o600)
    return path.name


def test_what_does_not_compile_is_told(shim: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the compiler's reason, or how its process ended."""
    monkeypatch.setenv("SHIM_DEVICES", "1")
    monkeypatch.setattr(Compiler, "find", classmethod(lambda cls: cls(library=shim, version="0")))
    records, folder = (save_programs.check_saving(_ONE, tmp_path / name) for name in ("records", "programs"))

    def problem(name: str) -> str:
        return save_programs._compile(records, name, _ONE, folder, ("", ""), 120)

    assert problem("0" * 64) == "its record is missing"
    assert problem(_record(records, b"mlir", b"no program")).startswith("it does not compile: ")
    assert list(folder.iterdir()) == []
    monkeypatch.setattr(libtpu_process, "ANSWER", "another.json")
    assert problem("0" * 64).startswith("the compiler ended")


@isolated
def test_replayed_micro_batches_are_no_updates() -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2).to("xla")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def accumulate(batch: torch.Tensor, last: bool) -> None:
        model(batch).square().mean().backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()

    step, batch, loops = CompiledStep(accumulate), torch.ones(3, 4), save_programs._Loops()
    for number in range(8):
        step(batch, number % 2 == 1)
    before = step.replays
    with loops.watching():
        loops.train(lambda: [step(batch, last) for last in (False, True)])
    assert (loops.updates, step.replays - before) == (1, 2)


# ---- the command, and what is refused -------------------------------------------------------------


def test_what_cannot_take_effect_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Compiler, "find", classmethod(lambda cls: cls(library=tmp_path, version="0")))
    with pytest.raises(UnsupportedOptionError, match="v5e:4x4 has several hosts"):
        save_programs.check_saving(Target.parse("v5e:4x4"), tmp_path)
    with pytest.raises(ConfigError, match="give a folder of this machine"):
        save_programs.check_saving(_ONE, "gs://bucket/programs")
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    with pytest.raises(ConfigError, match="others can write to"):
        save_programs.check_saving(_ONE, open_to_all)
    monkeypatch.setattr(save_programs, "runtime_name", lambda: "torch_tpu")
    with pytest.raises(UnsupportedOptionError, match="TorchTPU keeps programs by a cache of its own"):
        save_programs.check_saving(_ONE, tmp_path)
    train = _script(tmp_path, "")
    start = ["preflight", "--topology", "v5e:1x1", "--save-programs", str(tmp_path / "programs")]
    for arguments, message in (
        (["--model", "a:b", "--batch", "8"], "--save-programs is for scripts"),
        (["--sharding", "fsdp", str(train)], "would not be sharded by --sharding"),
    ):
        assert main([*start, *arguments]) == 2
        assert message in capfd.readouterr().err


def test_slices_have_names_and_hosts() -> None:
    known = {text: Target.parse(text) for text in ("v5e:2x4", "v4:2x2x1", "v5p:2x2x1", "v6e:2x4", "tpu7x:2x2x1")}
    named = {text: target.accelerator for text, target in known.items()}
    assert named == {
        "v5e:2x4": "v5litepod-8",
        "v4:2x2x1": "v4-8",
        "v5p:2x2x1": "v5p-8",
        "v6e:2x4": "v6e-8",
        "tpu7x:2x2x1": "tpu7x-8",
    }
    assert all(math.prod(target.chips) <= target.chips_of_host for target in known.values())


def test_the_report_says_what_was_saved() -> None:
    report = PreflightReport(what="train.py", topology="v5e:1x1", problem="it failed")
    saved = SavedPrograms(folder="programs", saved=4, failed=("no such operation",), seconds=3.0)
    text = dataclasses.replace(report, programs=saved).text()
    assert "SAVED 4 programs in programs, in 3 s" in text
    assert "NOT SAVED: no such operation" in text
    assert not saved.is_complete
    assert dataclasses.replace(report, programs=saved).as_values()["programs"]["saved"] == 4
    none = SavedPrograms(folder="programs", problem="it ended")
    assert "NO PROGRAM SAVED: it ended" in dataclasses.replace(report, programs=none).page()
