"""`examine`: versions, devices, known traps of this installation, and a short test of each feature."""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import platform
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, requires, version

from xla_adapters.utils.child_process import Asked, ask, python_path

_PACKAGE = "xla-adapters"
_BESIDE = ("libtpu", "jax", "tensorboard")
# The extras of runtimes, frameworks and other libraries, whose packages are reported.
_EXTRAS = ("xla", "torch-tpu", "hf", "lightning", "ecosystem")
# Prefixes and names of variables that torch_xla, XLA, libtpu, glibc or this package read.
_VARIABLES = ("XLA_", "PJRT_", "PT_XLA", "TPU_", "CPU_NUM_DEVICES", "LIBTPU", "MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD")
_MORE_VARIABLES = ("OMP_NUM_THREADS", "ACCELERATE_USE_CPU", "TF_CPP_MIN_LOG_LEVEL")

# The pair that this package is written for.
_PAIR = (2, 9)
# Tests whose names are those of `doctor_trials.TRIALS`. The first says what the devices are.
_DEVICES = "devices"
TOGETHER = (_DEVICES, "eager operation", "compiled step", "read inside a step", "replay", "checkpoint")
# Each in a process of its own; they take longer.
APART = ("several devices", "adapters")
# After so many a test is ended.
_SECONDS = 60
_KEPT_OUTPUT = 3000


@dataclass(frozen=True, kw_only=True)
class System:
    """What a training runs with.

    Attributes:
        versions: of Python and the packages, by name; packages that are not installed are absent.
        machine: the processor, its cores, the memory.
        environment: the variables that matter.
        hardware: the kind of device, as PJRT names it; empty if no test found out.
        devices: how many there are.
    """

    versions: Mapping[str, str]
    machine: str
    environment: Mapping[str, str] = field(default_factory=dict)
    hardware: str = ""
    devices: int = 0

    def number(self, package: str) -> tuple[int, int]:
        """The first two numbers of a package's version; (0, 0) if it is not installed."""
        found = re.match(r"(\d+)\.(\d+)", self.versions.get(package.replace("_", "-"), ""))
        return (int(found[1]), int(found[2])) if found else (0, 0)

    def is_set(self, variable: str) -> bool:
        """Whether an environment variable is set to something other than no."""
        return self.environment.get(variable, "").lower() not in ("", "0", "false")


def this_system() -> System:
    """The system of this process; starts no runtime."""
    environment = {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(_VARIABLES) or name in _MORE_VARIABLES
    }
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    machine = f"{platform.platform()}, {os.cpu_count()} cores, {memory:.0f} GiB of memory"
    return System(versions=_versions(), machine=machine, environment=environment)


def _versions() -> dict[str, str]:
    names = [_PACKAGE, *dict.fromkeys(map(_name, _requirements())), *_BESIDE]
    found = {"python": platform.python_version()}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _requirements() -> list[str]:
    """What the package needs, and what its extras for runtimes and frameworks do."""
    wanted = [f"extra == {quote}{extra}{quote}" for extra in _EXTRAS for quote in "'\""]
    try:
        stated = requires(_PACKAGE) or []
    except PackageNotFoundError:
        return ["torch", "torch-xla"]
    return [line for line in stated if "extra ==" not in line or any(extra in line for extra in wanted)]


def _name(requirement: str) -> str:
    found = re.match(r"[\w.-]+", requirement)
    assert found is not None
    return found[0].replace("_", "-")


# ---- what is known to go wrong with particular versions, devices and variables -------------------------


@dataclass(frozen=True, kw_only=True)
class Trap:
    """Something that is known to go wrong.

    Attributes:
        applies: whether it does on a system.
        what: what happens, and what to do.
        is_fault: whether nothing works right with it; others are only good to know.
    """

    applies: Callable[[System], bool]
    what: str
    is_fault: bool = False


def traps_of(system: System) -> list[Trap]:
    """The traps that a system has, the faults first."""
    return sorted((trap for trap in TRAPS if trap.applies(system)), key=lambda trap: not trap.is_fault)


def _is_on(hardware: str) -> Callable[[System], bool]:
    return lambda system: system.hardware == hardware


def _is_set(variable: str) -> Callable[[System], bool]:
    return lambda system: system.is_set(variable)


TRAPS = (
    Trap(
        applies=lambda system: system.number("torch") != system.number("torch_xla"),
        what="torch and torch_xla are of different releases: torch_xla does not load, or crashes. Install the pair "
        "torch==2.9.0 torch_xla==2.9.0",
        is_fault=True,
    ),
    Trap(
        applies=lambda system: system.number("torch_xla") not in (_PAIR, (0, 0)),
        what="this package is written for torch_xla 2.9: with another release steps may not be replayed (a warning "
        "says so), and errors may have other texts",
        is_fault=True,
    ),
    Trap(
        applies=_is_set("XLA_DISABLE_FUNCTIONALIZATION"),
        what="XLA_DISABLE_FUNCTIONALIZATION is set: a failed step could not be undone, so it is refused. Unset it",
        is_fault=True,
    ),
    Trap(
        applies=_is_set("XLA_AUTO_SPMD"),
        what="XLA_AUTO_SPMD is set: torch_xla's own automatic sharding is refused. Unset it and use auto_sharding=True",
        is_fault=True,
    ),
    Trap(
        applies=lambda system: system.is_set("XLA_USE_BF16") or system.is_set("XLA_DOWNCAST_BF16"),
        what="XLA_USE_BF16 or XLA_DOWNCAST_BF16 is set: torch_xla removed these; values stay float32. Use bf16=True "
        "(HF) or precision='bf16-true' (Lightning)",
    ),
    Trap(
        applies=_is_set("XLA_USE_SPMD"),
        what="XLA_USE_SPMD is set: the process drives all its devices as one. A Trainer without sharding= is refused",
    ),
    Trap(
        applies=lambda system: any(system.is_set(name) for name in ("PT_XLA_DEBUG", "PT_XLA_DEBUG_LEVEL")),
        what="PT_XLA_DEBUG is set: torch_xla prints an analysis of each execution, which takes time in each step",
    ),
    Trap(
        applies=lambda system: any(name.startswith("XLA_SAVE_TENSORS") for name in system.environment),
        what="XLA_SAVE_TENSORS_FILE is set: torch_xla appends each graph to that file",
    ),
    Trap(
        applies=lambda system: "XLA_COMPILATION_CACHE_SIZE" in system.environment,
        what="XLA_COMPILATION_CACHE_SIZE is set: torch_xla forgets executables beyond that number, and compiles them "
        "again; 2,048 is the default",
    ),
    Trap(
        applies=_is_set("ACCELERATE_USE_CPU"),
        what="ACCELERATE_USE_CPU is set: accelerate takes the plain CPU, and our Trainer refuses it. Unset it",
    ),
    Trap(
        applies=lambda system: "PJRT_DEVICE" not in system.environment,
        what="PJRT_DEVICE is not set: torch_xla takes a TPU if it finds one, else the CPU. Set it to be sure",
    ),
    Trap(
        applies=_is_on("CPU"),
        what="XLA:CPU does not load compiled graphs from torch_xla's persistent cache: each process compiles again",
    ),
    Trap(
        applies=_is_on("CPU"),
        what="XLA:CPU compiles deep models slowly: xla_adapters.initialize(fast_compile=True) helps",
    ),
    Trap(
        applies=_is_on("TPU"),
        what="torch_xla 2.9 does not load its persistent cache on TPUs (pytorch/xla#9094): each process compiles again",
    ),
    Trap(
        applies=_is_on("TPU"),
        what="a TPU belongs to one process at a time: another one that uses it makes the start of the runtime fail",
    ),
    Trap(
        applies=lambda system: system.hardware in ("CUDA", "GPU"),
        what="torch_xla has no released plugin for CUDA since 2.8, and nothing of this package was tried on one",
    ),
)


# ---- tests -------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How one test went.

    Attributes:
        name: of the test.
        state: `ok`, `failed` or `skipped`.
        text: what it found, or why not.
        seconds: how long it took.
        output: the end of what a failed one printed.
    """

    name: str
    state: str
    text: str
    seconds: float
    output: str = ""


@dataclass(frozen=True, kw_only=True)
class Examination:
    """What `doctor` found: the system, and how each test went."""

    system: System
    outcomes: Sequence[Outcome]

    @property
    def failed(self) -> list[Outcome]:
        """The tests that failed."""
        return [outcome for outcome in self.outcomes if outcome.state == "failed"]

    @property
    def status(self) -> int:
        """Exit status: 1 if a test failed, or a trap is known with which nothing works right."""
        return int(bool(self.failed) or any(trap.is_fault for trap in traps_of(self.system)))

    def text(self) -> str:
        """The report, to read and to put into a bug report."""
        system = self.system
        lines = ["versions"]
        lines += [f"  {name:22} {number}" for name, number in system.versions.items()]
        lines += ["", "machine", f"  {system.machine}"]
        lines.append(f"  {system.devices} {system.hardware or 'unknown'} device(s)")
        lines += [f"  {name}={value}" for name, value in system.environment.items()]
        lines += ["", "known traps of this combination"]
        lines += [f"  {'!' if trap.is_fault else '-'} {trap.what}" for trap in traps_of(system)] or ["  none"]
        lines += ["", "tests"]
        lines += [
            f"  {outcome.state.replace('failed', 'FAILED'):8}{outcome.name:20}{outcome.seconds:5.1f} s  {outcome.text}"
            for outcome in self.outcomes
        ]
        for outcome in (outcome for outcome in self.failed if outcome.output):
            lines += ["", f"output of the test {outcome.name!r}"]
            lines += [f"  | {line}" for line in outcome.output.splitlines()]
        lines += ["", "in a bug report: all of this, what you ran, the whole error with its traceback; for a slow step"]
        lines.append("the lines of the logger xla_adapters, and what `xla-adapters check SCRIPT` says")
        return "\n".join(lines)

    def json(self) -> str:
        """The report for other programs."""
        values = {
            "status": self.status,
            "system": dataclasses.asdict(self.system),
            "traps": [{"what": trap.what, "is_fault": trap.is_fault} for trap in traps_of(self.system)],
            "tests": [dataclasses.asdict(outcome) for outcome in self.outcomes],
        }
        return json.dumps(values, indent=1)


def examine(*, is_full: bool = False) -> Examination:
    """Runs the tests, in processes of their own; looks up the traps.

    Args:
        is_full: whether those of several devices and of the adapters are run, too; they take longer.
    """
    outcomes = [*run(TOGETHER)]
    for name in APART if is_full else ():
        outcomes += run([name])
    system = this_system()
    found = next((outcome for outcome in outcomes if outcome.name == _DEVICES and outcome.state == "ok"), None)
    if found is not None:
        system = dataclasses.replace(system, **json.loads(found.text))
        text = f"{system.devices} {system.hardware}"
        outcomes = [dataclasses.replace(item, text=text) if item is found else item for item in outcomes]
    return Examination(system=system, outcomes=outcomes)


def run(names: Sequence[str]) -> Iterator[Outcome]:
    """Runs tests one after the other in a process. Where one ends it, the others are run in a further one.

    Args:
        names: of the tests.
    """
    while names:
        began = time.perf_counter()
        environment = {**os.environ, "PYTHONPATH": python_path()}
        ended = ask(try_requested, json.dumps(names).encode(), environment=environment, timeout=600)
        output = ended.printed[-_KEPT_OUTPUT:]
        text = ended.answers[0].decode() if ended.answers else f"the process of the tests {ended.how}"
        if text:
            seconds = time.perf_counter() - began
            yield Outcome(name="import", state="failed", text=text, seconds=seconds, output=output)
            return
        found = [Outcome(**json.loads(answer)) for answer in ended.answers[1:]]
        if len(found) < len(names):
            seconds = time.perf_counter() - began - sum(outcome.seconds for outcome in found)
            text = f"its process {ended.how}"
            found.append(Outcome(name=names[len(found)], state="failed", text=text, seconds=seconds))
        for outcome in found:
            yield dataclasses.replace(outcome, output=output) if outcome.state == "failed" else outcome
        names = names[len(found) :]


def try_requested(asked: Asked) -> None:
    """What the process does: answers once when it has imported the runtime, or why not, and then for each test."""
    # The collector would look again and again at what the import makes, a seventh of its time.
    gc.disable()
    from xla_adapters.errors import ConfigError
    from xla_adapters.runtime import get_runtime
    from xla_adapters.tools.doctor_trials import TRIALS, Skipped

    try:
        get_runtime()
    except ConfigError as error:
        asked.answer(str(error).partition("\n")[0].encode())
        return
    gc.enable()
    asked.answer(b"")
    for name in json.loads(asked.request):
        began = time.perf_counter()
        signal.alarm(_SECONDS)
        try:
            state, text = "ok", TRIALS[name]()
        except Skipped as why:
            state, text = "skipped", str(why)
        except BaseException as error:  # noqa: BLE001 (it is reported)
            traceback.print_exc()
            state, text = "failed", f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        sys.stdout.flush()
        outcome = Outcome(name=name, state=state, text=text, seconds=time.perf_counter() - began)
        asked.answer(json.dumps(dataclasses.asdict(outcome)).encode())
