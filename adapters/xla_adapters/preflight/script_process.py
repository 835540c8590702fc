"""The process that traces a script: `python -m xla_adapters.preflight.script_process FOLDER`."""

from __future__ import annotations

import faulthandler
import json
import os
import pickle
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from xla_adapters.config import XLAConfig
from xla_adapters.errors import ConfigError
from xla_adapters.preflight.step_capture import EVALUATION, TRAINING, StepCapture, Taken
from xla_adapters.preflight.traced_step import TracedStep
from xla_adapters.runtime import get_runtime, prepare
from xla_adapters.scripts.put_in import Hand, put_in
from xla_adapters.scripts.running import run_command
from xla_adapters.scripts.saving import FilesWritten, skipping_saves
from xla_adapters.sharding import ShardingConfig, ShardingPlan
from xla_adapters.sharding.measure import unpack
from xla_adapters.utils.location import described
from xla_adapters.utils.patching import replaced

# A script is requested by the first, another training by the second.
REQUEST, JOB, ANSWER = "request.json", "job.pickle", "answer.pickle"


@dataclass(kw_only=True)
class Traced:
    """What tracing a script gave.

    Attributes:
        steps: the graphs of its steps, that of the training step first.
        plan: how its model is sharded; None if it is not.
        changed, skipped, written: what was put in, not saved, and written all the same, in words.
        problem: why there is no graph of a training step, or none of an evaluation; empty if there is.
        invalid: whether the problem is an option that cannot work.
        in_output: whether only what the script printed may say more about the problem.
    """

    steps: list[TracedStep] = field(default_factory=list)
    plan: ShardingPlan | None = None
    changed: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    written: list[str] = field(default_factory=list)
    problem: str = ""
    invalid: bool = False
    in_output: bool = False


@dataclass(frozen=True)
class Loops:
    """What trainers that are put in do: their loops run until the graphs of their steps are taken.

    Args:
        capture: takes the graphs.
    """

    capture: StepCapture

    def train(self, loop: Callable[[], object]) -> None:
        """Runs a training loop until it has updated once."""
        with self.capture.taking(TRAINING):
            loop()

    def evaluate(self, loop: Callable[[], object]) -> None:
        """Runs an evaluation loop for one step."""
        with self.capture.taking(EVALUATION):
            loop()

    @property
    def is_taking(self) -> bool:
        """Whether such a loop is running."""
        return bool(self.capture.phase)

    def end(self) -> None:
        """Ends the script."""
        raise Taken


def trace(
    folder: Path,
    run: Callable[[Hand], object],
    *,
    generation: str,
    sharding: str | None = None,
    spmd: bool = False,
    puts_in: bool = True,
) -> Traced:
    """Runs a training until it has updated once, and writes the graphs of its steps to a file.

    Args:
        folder: for the file, and for temporary files.
        run: the training; it is given what changes trainers.
        generation: of the devices that plans are made for.
        sharding: for trainers that do not shard by themselves; None leaves them as they are.
        spmd: whether the training is sharded in any case.
        puts_in: whether trainers are changed when they are constructed.
    """
    traced, capture = Traced(), make_capture()
    get_runtime().abstract.prepare()
    # As an import of an adapter would, before another library starts the runtime.
    prepare()
    if spmd or sharding is not None:
        # Before the script starts the runtime without it, as transformers.TrainingArguments do.
        get_runtime().device.initialize(spmd=True)
    hand = Hand(
        folder=folder,
        change=_adding_to(traced.changed),
        skip=_adding_to(traced.skipped),
        sharding=sharding,
        loops=Loops(capture),
    )
    with ExitStack() as stack:
        stack.enter_context(capture.capturing())
        stack.enter_context(skipping_saves(folder, hand.skip))
        if puts_in:
            stack.enter_context(put_in(hand))
        stack.enter_context(_options_for(generation))
        FilesWritten(traced.written.append)
        try:
            run(hand)
        except Taken:
            pass
        except SystemExit as error:
            traced.problem = f"the script ended with the exit status {error.code}" if error.code else ""
            traced.in_output = bool(error.code)
        except BaseException as error:  # noqa: BLE001 (it is reported)
            traceback.print_exception(error)
            traced.problem, traced.invalid = described(error), isinstance(error, ConfigError)
    traced.steps = sorted(capture.steps, key=lambda step: (step.kind != TRAINING, step.kind == EVALUATION))
    traced.plan = capture.plan
    if not traced.problem and not any(step.kind == TRAINING for step in traced.steps):
        traced.problem, traced.in_output = _without_update(capture), capture.failure is None
    (folder / ANSWER).write_bytes(pickle.dumps(traced))
    return traced


def make_capture() -> StepCapture:
    """What takes the graphs of steps on the runtime in use."""
    if get_runtime().has_placeholders:
        from xla_adapters.preflight.placeholder_capture import PlaceholderStepCapture

        return PlaceholderStepCapture()
    from xla_adapters.preflight.lazy_capture import LazyStepCapture

    return LazyStepCapture()


def _without_update(capture: StepCapture) -> str:
    """Why a script that ended by itself has no training step."""
    if capture.failure is not None:
        return f"the training raised, and the script went on: {described(capture.failure)}"
    return (
        "the script ended without an update in a step of xla-adapters: a loop of your own marks its steps by `with "
        "xla_adapters.step():` or a function decorated with xla_adapters.CompiledStep"
    )


@contextmanager
def _options_for(generation: str) -> Iterator[None]:
    """A context in which options are those of a pre-flight.

    The planner plans for its devices, unless others are named. Where a training would execute a part of a step and go
    on with its values, which are not there, is an error.
    """
    check, check_step = ShardingConfig.__post_init__, XLAConfig.__post_init__

    def checked(config: ShardingConfig) -> None:
        if config.scheme == "auto" and config.plan is None and config.topology is None:
            object.__setattr__(config, "topology", generation)
        check(config)

    def step_checked(config: XLAConfig) -> None:
        check_step(config)
        object.__setattr__(config, "on_graph_break", "error")

    with (
        replaced(ShardingConfig, "__post_init__", checked),
        replaced(XLAConfig, "__post_init__", step_checked),
    ):
        yield


def _adding_to(notes: list[str]) -> Callable[[str], None]:
    def add(note: str) -> None:
        if note not in notes:
            notes.append(note)

    return add


def _main(folder: Path) -> None:
    from xla_adapters.preflight import script_process

    # Not `__main__`'s own classes: what is pickled must be found by its module's name.
    trace = script_process.trace
    if (folder / JOB).is_file():
        _trace_job(folder, trace)
        return
    request = json.loads((folder / REQUEST).read_text())
    trace(
        folder,
        lambda hand: run_command(request["command"]),
        generation=request["generation"],
        sharding=request["sharding"],
    )


def _trace_job(folder: Path, trace: Callable[..., Traced]) -> None:
    generation, spmd, data = pickle.loads((folder / JOB).read_bytes())

    def run(hand: Hand) -> None:
        # Here, where strategies that it holds find a device without memory.
        job: Any = unpack(data)
        job.run(job.model, job.batch, hand)

    trace(folder, run, generation=generation, spmd=spmd, puts_in=False)


if __name__ == "__main__":
    # The runtime crashes where values are needed that placeholders do not have.
    faulthandler.enable()
    _main(Path(sys.argv[1]))
    sys.stdout.flush()
    sys.stderr.flush()
    # The script is left in the middle: its worker processes and threads end with this process.
    os._exit(0)
