"""`xla-adapters doctor`: the tests of features, the known traps, and the report."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from tests.isolation import outcome_of
from xla_adapters import runtime
from xla_adapters.cli import main
from xla_adapters.tools import doctor
from xla_adapters.tools.doctor import APART, TOGETHER, TRAPS, Examination, Outcome, System, this_system, traps_of
from xla_adapters.tools.doctor_trials import TRIALS, Skipped
from xla_adapters.utils.child_process import Asked, Ended

_PAIR = {"torch": "2.9.0", "torch-xla": "2.9.0"}


def _system(
    hardware: str = "CUSTOM", versions: Mapping[str, str] = _PAIR, environment: Mapping[str, str] | None = None
) -> System:
    environment = {"PJRT_DEVICE": hardware} if environment is None else environment
    return System(versions=versions, machine="", environment=environment, hardware=hardware, devices=1)


@pytest.fixture
def _in_a_fork(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The process of the tests is forked: it has imported all, and what a test has changed."""

    def ask(work: Callable[[Asked], None], request: bytes, **_: object) -> Ended:
        folder = Path(tempfile.mkdtemp(dir=tmp_path))

        def child() -> None:
            # pytest's own stdout does not end in the child's.
            with open(1, "w", closefd=False) as printed, contextlib.redirect_stdout(printed):
                work(Asked(request, folder))

        ended = outcome_of(child)
        answers = [path.read_bytes() for path in sorted(folder.glob("answer_*"))]
        return Ended(how="ended" if ended.ok else "died", printed=f"{ended.output}{ended.error or ''}", answers=answers)

    monkeypatch.setattr(doctor, "ask", ask)


@pytest.mark.usefixtures("_in_a_fork")
@pytest.mark.parametrize("names", [TOGETHER, *([name] for name in APART)])
def test_each_feature_works_here(names: Sequence[str]) -> None:
    outcomes = {outcome.name: outcome for outcome in doctor.run(names)}
    assert list(outcomes) == list(names)
    assert all(outcome.state == "ok" and outcome.seconds > 0 for outcome in outcomes.values()), outcomes
    if "devices" in outcomes:
        assert json.loads(outcomes["devices"].text) == {"hardware": "CPU", "devices": 1}
    if "several devices" in outcomes:
        assert outcomes["several devices"].text.startswith("2 devices")


def test_each_test_has_a_group() -> None:
    assert {*TOGETHER, *APART} == TRIALS.keys()


def _skipped() -> str:
    raise Skipped("there is one device")


def _dies() -> str:
    os.kill(os.getpid(), signal.SIGKILL)
    return ""


def _fails() -> str:
    print("before")
    raise RuntimeError("no\nmore")


@pytest.mark.usefixtures("_in_a_fork")
@pytest.mark.parametrize(
    ("trial", "state", "text"),
    [
        (_skipped, "skipped", "there is one device"),
        (_dies, "failed", "its process died"),
        (_fails, "failed", "RuntimeError: no"),
    ],
)
def test_what_does_not_work_is_told(
    trial: Callable[[], str], state: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TRIALS, "made up", trial)
    monkeypatch.setitem(TRIALS, "afterwards", lambda: "goes on")
    outcome, other = doctor.run(["made up", "afterwards"])
    assert (outcome.state, outcome.text) == (state, text)
    assert (other.name, other.state, other.text) == ("afterwards", "ok", "goes on")
    assert ("before" in outcome.output) == (trial is _fails)


@pytest.mark.usefixtures("_in_a_fork")
def test_a_runtime_that_cannot_be_imported_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_runtime() -> None:
        raise ImportError("undefined symbol")

    monkeypatch.setattr(runtime, "get_runtime", no_runtime)
    (outcome,) = doctor.run(TOGETHER)
    assert (outcome.name, outcome.state, outcome.text) == ("import", "failed", "the process of the tests died")
    assert "ImportError: undefined symbol" in outcome.output


def test_no_trap_on_a_system_that_is_right() -> None:
    assert traps_of(_system()) == []


@pytest.mark.parametrize(
    ("system", "words"),
    [
        (_system(versions={"torch": "2.10.0", "torch-xla": "2.9.0"}), "different releases"),
        (_system(versions={"torch": "2.8.0", "torch-xla": "2.8.0"}), "written for torch_xla 2.9"),
        (_system(environment={"PJRT_DEVICE": "X", "XLA_DISABLE_FUNCTIONALIZATION": "1"}), "could not be undone"),
        (_system(environment={"PJRT_DEVICE": "X", "XLA_AUTO_SPMD": "1"}), "automatic sharding is refused"),
        (_system(environment={"PJRT_DEVICE": "X", "XLA_USE_BF16": "1"}), "stay float32"),
        (_system(environment={"PJRT_DEVICE": "X", "XLA_USE_SPMD": "1"}), "drives all its devices"),
        (_system(environment={"PJRT_DEVICE": "X", "PT_XLA_DEBUG": "1"}), "takes time in each step"),
        (_system(environment={"PJRT_DEVICE": "X", "XLA_SAVE_TENSORS_FILE": "a"}), "appends each graph"),
        (_system(environment={"PJRT_DEVICE": "X", "XLA_COMPILATION_CACHE_SIZE": "4"}), "forgets executables"),
        (_system(environment={"PJRT_DEVICE": "X", "ACCELERATE_USE_CPU": "true"}), "takes the plain CPU"),
        (_system(environment={}), "PJRT_DEVICE is not set"),
        (_system("CPU"), "XLA:CPU"),
        (_system("TPU"), "TPU"),
        (_system("CUDA"), "no released plugin for CUDA"),
    ],
)
def test_a_trap_is_known_by_its_system(system: System, words: str) -> None:
    found = traps_of(system)
    assert found
    assert all(words in trap.what for trap in found)


def test_variables_that_say_no_are_no_traps() -> None:
    environment = {"PJRT_DEVICE": "X", "PT_XLA_DEBUG": "0", "XLA_USE_SPMD": "", "XLA_AUTO_SPMD": "false"}
    assert traps_of(_system(environment=environment)) == []


def test_this_system() -> None:
    system = this_system()
    assert {"python", "torch", "torch-xla", "transformers", "lightning"} <= system.versions.keys()
    assert system.number("torch_xla") == (2, 9)
    assert system.environment["PJRT_DEVICE"] == "CPU"


def test_the_report() -> None:
    outcomes = [
        Outcome(name="replay", state="ok", text="4 of 6", seconds=1.0),
        Outcome(name="checkpoint", state="failed", text="no room", seconds=2.0, output="Traceback"),
    ]
    examination = Examination(system=_system(versions={**_PAIR, "python": "3.11.1"}), outcomes=outcomes)
    text = examination.text()
    assert examination.status == 1
    for line in (f"{'python':22} 3.11.1", "FAILED  checkpoint            2.0 s  no room", "| Traceback", "1 CUSTOM"):
        assert line in text
    assert json.loads(examination.json())["tests"][1]["state"] == "failed"
    assert Examination(system=_system(), outcomes=outcomes[:1]).status == 0
    assert Examination(system=_system(versions={"torch": "2.8.0"}), outcomes=[]).status == 1


def test_faults_come_first() -> None:
    environment = {"XLA_AUTO_SPMD": "1", "PT_XLA_DEBUG": "1"}
    faults = [trap.is_fault for trap in traps_of(_system("TPU", environment=environment))]
    assert faults == sorted(faults, reverse=True)
    assert len(faults) < len(TRAPS)


@pytest.mark.slow
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--full", "--json", str(tmp_path / "doctor.json")]) == 0
    assert "1 compile, 1 execution per step" in capsys.readouterr().out
    values = json.loads((tmp_path / "doctor.json").read_text())
    assert (values["status"], values["system"]["hardware"]) == (0, "CPU")
    assert {test["state"] for test in values["tests"]} == {"ok"}
    assert {test["name"] for test in values["tests"]} == TRIALS.keys()


@pytest.mark.usefixtures("_in_a_fork")
def test_without_a_runtime_it_says_so_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "_runtime", None)
    monkeypatch.setattr(runtime, "find_spec", lambda name: None)
    text = doctor.examine().text()
    assert "neither torch_xla nor torch_tpu is installed: pip install" in text
    assert "Traceback" not in text
    assert "output of the test" not in text
