"""`save_programs`: compiles the programs of a run on TPUs ahead, into a folder that the run loads them from.

The training really runs, for two updates and two steps of its evaluation, in a process of its own whose devices stand
in for TPUs (a PJRT plugin for the CPU). plugin.c records each program that is to be compiled there. libtpu compiles the
records for the slice, each in a process of its own (libtpu_process.py), where plugin.c gives the result the name that a
run on the slice will look for.
"""

from __future__ import annotations

import faulthandler
import json
import math
import os
import pickle
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from xla_adapters.errors import ConfigError, UnsupportedOptionError
from xla_adapters.replay.replayed_call import ReplayedCall
from xla_adapters.runtime import get_runtime, prepare, runtime_name
from xla_adapters.runtime.compile_cache import (
    COMPILE_CACHE,
    LIBRARY,
    FolderProblem,
    described,
    entries,
    open_folder,
    why_missing,
)
from xla_adapters.sharding.measure import PlanCache
from xla_adapters.tools import libtpu_process
from xla_adapters.tools.preflight_report import SavedPrograms
from xla_adapters.tools.step_capture import EVALUATION, TRAINING, Taken
from xla_adapters.tools.tpu_compiler import Compiler, Target, environment_of_compiler
from xla_adapters.tools.trace_process import Request, Traced, adding_to, run_of, run_to_end
from xla_adapters.tools.user_script import Hand
from xla_adapters.tracing.scope_report import ScopeReport
from xla_adapters.tracing.step_scope import StepScope, current_scope
from xla_adapters.utils.child_process import Asked, Ended, ask, python_path, run_python
from xla_adapters.utils.patching import wrapped

# The first update of an optimizer may differ from the others, and what follows a step belongs to the run, too.
_STEPS = 2
# At most so many steps of a loop are run.
_MOST_STEPS = 200
_STAND_IN = "xla_plugins.xla_cpu_pjrt"
_FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")


# ---- in the caller's process --------------------------------------------------------------------------


def check_saving(target: Target, folder: str | os.PathLike[str]) -> Path:
    """Raises if the programs of a run on the slice cannot be saved in the folder.

    Returns:
        The folder, which is made.

    Raises:
        ConfigError: something is not installed, or the folder cannot be used.
        UnsupportedOptionError: the runtime is TorchTPU, or the slice has several hosts.
    """
    if runtime_name() == "torch_tpu":
        raise UnsupportedOptionError(
            "save_programs: TorchTPU keeps programs by a cache of its own, in which only a process with the TPU can "
            "write. Leave it out; the first run keeps its programs (cache_dir)"
        )
    if math.prod(target.chips) > target.chips_of_host:
        raise UnsupportedOptionError(
            f"save_programs: {target} has several hosts, and only programs of one host can be saved: at most "
            f"{target.chips_of_host} chips of {target.generation}"
        )
    missing = why_missing()
    if missing is not None:
        raise ConfigError(f"save_programs: {missing}")
    Compiler.find()
    _stand_in()
    path = os.fspath(folder)
    if "://" in path:
        raise ConfigError(f"save_programs={path!r}: give a folder of this machine, and copy it")
    try:
        descriptor, writable = open_folder(Path(path).expanduser().absolute())
    except FolderProblem as problem:
        raise ConfigError(f"save_programs: {problem}") from problem
    os.close(descriptor)
    if not writable:
        raise ConfigError(f"save_programs: {path} cannot be written to")
    return Path(path).expanduser().absolute()


def save_programs(
    request: Request, target: Target, folder: Path, *, timeout: float, shows_output: bool = False
) -> SavedPrograms:
    """Compiles the programs that a run on a slice asks for, and writes them to a folder.

    Args:
        request: the training.
        target: the slice.
        folder: of `check_saving`.
        timeout: seconds for the run on the CPU, and for each compile.
        shows_output: whether what the run prints is shown.
    """
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="xla-adapters-") as name:
        ended = ask(
            record_requested,
            pickle.dumps((request, name, target.devices)),
            environment=_environment_of_run(target),
            timeout=timeout,
            shows_output=shows_output,
        )
        recorded = entries(Path(name))
        traced = _answer(ended)
        if traced.problem or not recorded:
            return SavedPrograms(folder=str(folder), problem=traced.problem or "the training compiled no program")
        # The largest takes longest, and shows first that something is wrong.
        names = [entry.path.name for entry in sorted(recorded, key=lambda entry: -entry.size)]
        problems = [_compile(Path(name), one, target, folder, traced.flags, timeout) for one in names]
        # A run that planned again might find another plan, of other programs.
        PlanCache(Path(name)).copy_to(folder)
    failed = tuple(problem for problem in problems if problem)
    return SavedPrograms(
        folder=str(folder),
        saved=len(names) - len(failed),
        failed=failed,
        seconds=time.monotonic() - begun,
    )


def _answer(ended: Ended) -> Traced:
    if not ended.answers:
        return Traced(problem=f"the run on the CPU {ended}")
    traced: Traced = pickle.loads(ended.answers[0])
    return replace(traced, problem=traced.problem + ended.output) if traced.in_output else traced


def _stand_in() -> Path:
    """The library of the plugin that stands in for libtpu.

    Raises:
        ConfigError: it is not installed.
    """
    # The parent first, which `find_spec` would import.
    spec = find_spec(_STAND_IN) if find_spec(_STAND_IN.partition(".")[0]) is not None else None
    if spec is None or spec.origin is None:
        raise ConfigError(
            "save_programs: the training runs on CPU devices that stand in for TPUs, and their plugin is not "
            "installed: pip install xla-cpu-pjrt==0.0.1"
        )
    return Path(spec.origin).with_name("xla_cpu_pjrt.so")


def _environment_of_run(target: Target) -> dict[str, str]:
    """As on the host of a TPU, for torch_xla and transformers."""
    # Not those that this process has added for its own devices.
    given = dict(part.split("=", 1) for part in _initial_environment() if "=" in part)
    environment = {name: value for name, value in os.environ.items() if name not in _FLAGS}
    return {
        **environment,
        **{name: given[name] for name in _FLAGS if name in given},
        "PYTHONPATH": python_path(),
        "TOKENIZERS_PARALLELISM": "false",
        "WANDB_MODE": "disabled",
        "PJRT_DEVICE": "TPU",
        "TPU_LIBRARY_PATH": str(LIBRARY),
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_ID": "0",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_ACCELERATOR_TYPE": target.accelerator,
        "TPU_PROCESS_BOUNDS": "1,1,1",
        "TPU_CHIPS_PER_PROCESS_BOUNDS": ",".join(map(str, _bounds(target))),
    }


def _initial_environment() -> list[str]:
    """The variables that this process was started with."""
    file = Path("/proc/self/environ")
    if not file.exists():
        return [f"{name}={value}" for name, value in os.environ.items()]
    return os.fsdecode(file.read_bytes()).split("\0")


def _bounds(target: Target) -> tuple[int, ...]:
    """The chips of the only host along three dimensions."""
    return (*target.chips, 1)[:3]


def _compile(recorded: Path, name: str, target: Target, folder: Path, flags: tuple[str, str], timeout: float) -> str:
    """Compiles a recorded program; returns why it is not saved, empty if it is."""
    compiler = Compiler.find()
    request = {
        "caching": str(LIBRARY),
        "library": str(compiler.library),
        "described": described(compiler.library, compiles_for_host=False),
        "name": name,
        "recorded": str(recorded),
        "folder": str(folder),
        "slice": [str(target), _bounds(target), target.options.get("chip_config_name")],
    }
    with tempfile.TemporaryDirectory(prefix="xla-adapters-") as scratch:
        Path(scratch, libtpu_process.REQUEST).write_text(json.dumps({"save": request}))
        ended = run_python(
            [libtpu_process.__file__, scratch], environment=environment_of_compiler(*flags), timeout=timeout
        )
        answered = Path(scratch, libtpu_process.ANSWER)
        if not answered.is_file():
            return f"the compiler {ended}"
        problem: str = json.loads(answered.read_text())["problem"]
        return problem


# ---- in the process of the run ------------------------------------------------------------------------


def record_requested(asked: Asked) -> None:
    """What the process of the run does: trains, and answers with a `Traced` without steps."""
    faulthandler.enable()
    request, records, devices = pickle.loads(asked.request)
    # Late: TorchTPU has none of it.
    from xla_adapters.runtime.torch_xla.device import set_flags_of_tpu

    set_flags_of_tpu()
    COMPILE_CACHE.record(_stand_in(), Path(records), devices)
    prepare()
    if request.spmd or request.sharding is not None:
        get_runtime().device.initialize(spmd=True)
    traced, loops = Traced(), _Loops()
    hand = Hand(
        folder=asked.folder,
        change=adding_to(traced.changed),
        skip=adding_to(traced.skipped),
        sharding=request.sharding,
        loops=loops,
        keeps_steps=bool(request.command),
    )
    with loops.watching():
        run_to_end(run_of(request, device="cpu"), hand, traced)
    if not traced.problem and not loops.updates:
        traced.problem, traced.in_output = "the script ended without an update in a step of xla-adapters", True
    traced.flags = COMPILE_CACHE.flags()
    asked.answer(pickle.dumps(traced))


@dataclass
class _Loops:
    """`Loops` of a run: they are left after a few steps.

    Attributes:
        updates: steps with an update so far.
    """

    updates: int = 0
    _phase: str = ""
    _left: int = 0
    _calls: int = field(default=0, repr=False)

    def train(self, loop: Callable[[], object]) -> None:
        """Runs a training loop until it has updated."""
        self._run(TRAINING, loop)

    def evaluate(self, loop: Callable[[], object]) -> None:
        """Runs an evaluation loop for a few steps."""
        self._run(EVALUATION, loop)

    @property
    def is_taking(self) -> bool:
        """Whether such a loop is running."""
        return bool(self._phase)

    def end(self) -> None:
        """Ends the script."""
        raise Taken

    def _run(self, phase: str, loop: Callable[[], object]) -> None:
        self._phase, self._left, self._calls = phase, _STEPS, 0
        try:
            loop()
        except Taken:
            pass
        finally:
            self._phase = ""

    @contextmanager
    def watching(self) -> Iterator[None]:
        """A context in which the steps are counted."""
        self._left = _STEPS
        with wrapped((StepScope, "close", self._around_close), (ReplayedCall, "close", self._around_close)):
            yield

    def _around_close(self, close: Callable[[Any], ScopeReport]) -> Callable[[Any], ScopeReport]:
        def closed(call: StepScope | ReplayedCall) -> ScopeReport:
            is_outer = not isinstance(call, StepScope) or current_scope() is call
            stepped = call.undo_logs()[-1].optimizers() if isinstance(call, StepScope) else call.stepping
            has_updated = bool(stepped)
            report = close(call)
            if is_outer:
                self._step_ended(has_updated=has_updated)
            return report

        return closed

    def _step_ended(self, *, has_updated: bool) -> None:
        self.updates += has_updated
        self._calls += 1
        self._left -= has_updated or self._phase == EVALUATION
        if self._left <= 0 or self._calls > _MOST_STEPS:
            raise Taken
