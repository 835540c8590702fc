"""`trace_in_process`: traces trainings in a process of its own, which sees as many virtual devices as the slice has.

A training is a script, or what a program has set up: a model without weights, and a function that trains it. Nothing is
compiled or run there; the process of the caller is not touched.
"""

from __future__ import annotations

import faulthandler
import functools
import os
import pickle
import re
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree

from xla_adapters.config import XLAConfig
from xla_adapters.errors import ConfigError
from xla_adapters.replay.step_program import StepProgram
from xla_adapters.runtime import eager, get_runtime, prepare, runtime_name
from xla_adapters.runtime.transfers import uploading
from xla_adapters.sharding import Placement, ShardingConfig, ShardingPlan
from xla_adapters.sharding.measure import loss_of, unpack
from xla_adapters.tools.step_capture import EVALUATION, TRAINING, StepCapture, Taken, TracedStep
from xla_adapters.tools.tpu_compiler import INSTALL_FOR_TORCH_TPU
from xla_adapters.tools.user_script import Hand, put_in, run_command, skipping_saves
from xla_adapters.tracing.optimizers import prime
from xla_adapters.utils.child_process import Asked, ask, python_path
from xla_adapters.utils.location import described, location_of_line
from xla_adapters.utils.patching import replaced

MakeOptimizer = Callable[[Sequence[torch.nn.Parameter]], torch.optim.Optimizer]
# What a program gives a model, what it is fed with, and the hand that ends the loops, to train it.
Run = Callable[[torch.nn.Module, Any, Hand], object]

# A package of the extra "preflight-torch-tpu".
_PLUGIN = "xla_plugins.xla_cpu_pjrt"
_FRAME = re.compile(r'^  File "([^"]+)", line (\d+) in ', re.MULTILINE)


def adamw(parameters: Sequence[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """torch's AdamW. The figures of a step do not depend on the values of an optimizer's options."""
    return torch.optim.AdamW(parameters, lr=1e-4, weight_decay=0.1)


def adam(parameters: Sequence[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """torch's Adam."""
    return torch.optim.Adam(parameters, lr=1e-4)


def sgd(parameters: Sequence[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """torch's SGD with momentum."""
    return torch.optim.SGD(parameters, lr=1e-4, momentum=0.9)


OPTIMIZERS: dict[str, MakeOptimizer] = {"adamw": adamw, "adam": adam, "sgd": sgd}


# ---- what is asked, and the answer ------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Training:
    """Trainings of a model, to be pickled (`pack`) without the values of its parameters.

    Attributes:
        model: on any device.
        batch: what the runs are given, on the host or on the meta device.
        runs: each trains a copy of the model, and is traced by itself.
    """

    model: torch.nn.Module
    batch: Any
    runs: Sequence[Run]


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is traced.

    Attributes:
        generation: of the devices that plans are made for.
        command: a script and its arguments; or `-m`, a module and its arguments.
        sharding: for trainers in it that do not shard by themselves; None leaves them as they are.
        training: a packed `Training`, if there is no command.
        count: of its runs.
        spmd: whether it is sharded in any case.
    """

    generation: str
    command: Sequence[str] = ()
    sharding: str | None = None
    training: bytes = b""
    count: int = 1
    spmd: bool = False


@dataclass(kw_only=True)
class Traced:
    """What tracing a training gave.

    Attributes:
        steps: the graphs of its steps, that of the training step first.
        plan: how its model is sharded; None if it is not.
        changed, skipped: what was put in, and what was not saved, in words.
        problem: why there is no graph of a training step, or none of an evaluation; empty if there is.
        invalid: whether the problem is an option that cannot work.
        in_output: whether only what the script printed may say more about the problem.
        flags: XLA_FLAGS and LIBTPU_INIT_ARGS of a run, if its programs were recorded.
    """

    steps: list[TracedStep] = field(default_factory=list)
    plan: ShardingPlan | None = None
    changed: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    problem: str = ""
    invalid: bool = False
    in_output: bool = False
    flags: tuple[str, str] = ("", "")


def trace_in_process(
    request: Request, devices: int, *, timeout: float = 900, shows_output: bool = False
) -> list[Traced]:
    """Traces trainings as they would run on devices that are no CPUs.

    Args:
        request: the trainings.
        devices: how many the process sees.
        timeout: seconds after which it is ended.
        shows_output: whether what it prints is shown.

    Returns:
        What tracing each of the trainings gave.

    Raises:
        ConfigError: with TorchTPU, the plugin that stands in for a TPU is not installed.
    """
    ended = ask(
        trace_requested,
        pickle.dumps(request),
        environment=environment_for(devices),
        timeout=timeout,
        shows_output=shows_output,
    )
    found: list[Traced] = [pickle.loads(answer) for answer in ended.answers]
    for traced in found:
        if traced.in_output:
            traced.problem += ended.output
    problem = f"the process that traces the steps {ended.how}{_crashed(ended.printed) or ended.output}"
    return [*found, *(Traced(problem=problem) for _ in range(request.count - len(found)))]


def environment_for(devices: int) -> dict[str, str]:
    """The environment of a process that traces for devices that are no CPUs.

    Args:
        devices: how many it sees; with TorchTPU always one.

    Raises:
        ConfigError: with TorchTPU, the plugin that stands in for a TPU is not installed.
    """
    environment = {
        "PYTHONPATH": python_path(),
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "TOKENIZERS_PARALLELISM": "false",
        # Nothing goes to services that log runs.
        "WANDB_MODE": "disabled",
    }
    if runtime_name() == "torch_tpu":
        # The parent first, which `find_spec` would import.
        spec = find_spec(_PLUGIN) if find_spec(_PLUGIN.partition(".")[0]) is not None else None
        if spec is None or not spec.submodule_search_locations:
            raise ConfigError(
                f"with TorchTPU a step is traced on a PJRT plugin that stands in for a TPU: {INSTALL_FOR_TORCH_TPU}"
            )
        return {
            **os.environ,
            **environment,
            # Not the TPU of this host, if it has one: it may be in use.
            "TPU_LIBRARY_PATH": str(Path(spec.submodule_search_locations[0]) / "xla_cpu_pjrt.so"),
            # Otherwise it waits for minutes for a server that only Google's machines have.
            "TPU_SKIP_MDS_QUERY": "1",
        }
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith(("XLA_", "PT_XLA"))},
        **environment,
        "PJRT_DEVICE": "CPU",
        "CPU_NUM_DEVICES": str(devices),
        # The step as devices that are no CPUs trace it.
        "XLA_ADAPTERS_CPU_TUNING": "0",
        # Operations name the line of Python that made them.
        "XLA_HLO_DEBUG": "1",
        "XLA_IR_DEBUG": "1",
    }


def _crashed(printed: str) -> str:
    """Where the process crashed, by the text of `faulthandler`; empty if it has not written one."""
    _, fatal, text = printed.partition("Fatal Python error: ")
    if not fatal:
        return ""
    frames = (location_of_line(file, int(line)) for file, line in _FRAME.findall(text))
    place = next((f" at {at.filename}:{at.lineno}" for at in frames if at.is_user_code), "")
    return (
        f" ({text.partition(os.linesep)[0]}){place}; in a pre-flight tensors have no values: nothing can be read from "
        "the device, and nothing computed on it outside of a step"
    )


# ---- in the process ---------------------------------------------------------------------------------


def trace_requested(asked: Asked) -> None:
    """What the process does: answers a `Request` with a `Traced` for each training."""
    # The runtime crashes where values are needed that placeholders do not have.
    faulthandler.enable()
    request: Request = pickle.loads(asked.request)
    for number in range(request.count):
        asked.answer(pickle.dumps(trace(asked.folder, run_of(request, number), request)))


def run_of(request: Request, number: int = 0, device: str = "meta") -> Callable[[Hand], object]:
    """A training of a request.

    Args:
        request: the request.
        number: which of them.
        device: of the parameters of a packed model, which are zeros if that one has memory.
    """
    if request.command:
        return functools.partial(_run_script, request.command)
    return functools.partial(_train, request.training, number, device)


def _run_script(command: Sequence[str], hand: Hand) -> None:
    with put_in(hand):
        run_command(list(command))


def _train(training: bytes, number: int, device: str, hand: Hand) -> None:
    # Unpacked here, where strategies that it holds find the device as it is to be.
    unpacked: Training = unpack(training, device)
    unpacked.runs[number](unpacked.model, unpacked.batch, hand)


@dataclass(frozen=True)
class TracedLoops:
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


def trace(folder: Path, run: Callable[[Hand], object], request: Request) -> Traced:
    """Runs a training until it has updated once; what was taken of it.

    Args:
        folder: for temporary files.
        run: the training; it is given what changes trainers.
        request: its options.
    """
    traced, capture = Traced(), make_capture()
    get_runtime().abstract.prepare()
    # As an import of an adapter would, before another library starts the runtime.
    prepare()
    if request.spmd or request.sharding is not None:
        # Before the script starts the runtime without it, as transformers.TrainingArguments do.
        get_runtime().device.initialize(spmd=True)
    hand = Hand(
        folder=folder,
        change=adding_to(traced.changed),
        skip=adding_to(traced.skipped),
        sharding=request.sharding,
        loops=TracedLoops(capture),
        has_values=False,
    )
    with capture.capturing(), _options_for(request.generation):
        run_to_end(run, hand, traced)
    traced.steps = sorted(capture.steps, key=lambda step: (step.kind != TRAINING, step.kind == EVALUATION))
    traced.plan = capture.plan
    if not traced.problem and not any(step.kind == TRAINING for step in traced.steps):
        traced.problem, traced.in_output = _without_update(capture), capture.failure is None
    return traced


def run_to_end(run: Callable[[Hand], object], hand: Hand, traced: Traced) -> None:
    """Runs a training until it ends or raises `Taken`, and saves nothing.

    Args:
        run: the training.
        hand: what changes trainers.
        traced: is told what went wrong.
    """
    with skipping_saves(hand.folder, hand.skip):
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


def make_capture() -> StepCapture:
    """What takes the graphs of steps on the runtime in use."""
    if get_runtime().has_placeholders:
        from xla_adapters.tools.placeholder_capture import PlaceholderStepCapture

        return PlaceholderStepCapture()
    from xla_adapters.tools.lazy_capture import LazyStepCapture

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


def adding_to(notes: list[str]) -> Callable[[str], None]:
    """Adds what is new to a list."""

    def add(note: str) -> None:
        if note not in notes:
            notes.append(note)

    return add


# ---- a model without a script -----------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class OneStep:
    """A `Run` of one training step: forward, loss, backward and update.

    Attributes:
        plan: how it is sharded; does not count on a runtime that cannot shard.
        around: returns a context for the forward pass.
        optimizer: makes the optimizer of the parameters that are trained.
    """

    plan: ShardingPlan
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    optimizer: MakeOptimizer = adamw

    def __call__(self, model: torch.nn.Module, batch: Any, hand: Hand) -> None:
        """Runs it."""
        assert hand.loops is not None
        hand.loops.train(lambda: self._update(model, batch))

    def _update(self, model: torch.nn.Module, batch: Any) -> None:
        runtime = get_runtime()
        to_device = runtime.transfers.to_device
        with ExitStack() as stack:
            if runtime.has_placeholders:
                model.to(runtime.device.torch_device())
            else:
                stack.enter_context(eager(True))
                placement = Placement(self.plan, runtime)
                placement.move_model(model)
            _move_attributes(model, to_device)
            batch = _pytree.tree_map_only(torch.Tensor, to_device, batch)
            optimizer = self.optimizer([value for value in model.parameters() if value.requires_grad])
            if not runtime.has_placeholders:
                placement.place_batch(batch)
                with uploading():
                    prime(optimizer)
                stack.enter_context(placement.constraining(model))
            program = StepProgram(name="preflight step", config=XLAConfig())
            program.open(inputs=batch)
            try:
                with self.around():
                    loss = loss_of(model(**batch) if isinstance(batch, dict) else model(*batch))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                # The loss is a result of the step's graph as long as it is held.
                program.close()
                del loss
            finally:
                program.abort()


def _move_attributes(model: torch.nn.Module, moved: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Replaces tensors on the meta device that modules hold as plain attributes (rotary frequencies, ...)."""
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, torch.Tensor) and value.device.type == "meta":
                setattr(module, name, moved(value))
