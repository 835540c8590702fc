"""The steps of a Fabric loop, and what `fabric.launch()` changes in the process."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import Any, Literal

import lightning.fabric.fabric
import lightning.fabric.wrappers
import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch.optim import Optimizer
from torchmetrics import Metric

from lightning_strategy.connector import flops_of_devices
from lightning_strategy.metric_patches import metrics_without_reads
from lightning_strategy.metrics import MetricSnapshot
from lightning_strategy.refusals import check_nesting
from lightning_strategy.shapes import LoaderShapes
from lightning_strategy.sharding import ModuleSharding
from xla_adapters import StepProgram, StepScope, StepSeed, XLAConfig, get_runtime, in_step
from xla_adapters.data.shapes import ShapePolicy
from xla_adapters.errors import ConfigError, RuntimeOrderError
from xla_adapters.loop.steps import around_run
from xla_adapters.runtime.rng import resume_random_algorithm
from xla_adapters.runtime.transfers import uploading
from xla_adapters.tracing.discarding import Discarding
from xla_adapters.tracing.library_reads import LibraryReads, allowing_reads, reads_of_packages
from xla_adapters.tracing.make_scope import EagerScope, LazyScope
from xla_adapters.tracing.step import Step
from xla_adapters.utils.patching import replaced
from xla_adapters.utils.torch_modes import as_if_compiling, inference_mode_as_no_grad

StepKind = Literal["train", "eval"]

_HINT = " (behind the step; what it made is there then)"
_STREAMS: dict[StepKind, int] = {"train": 0, "eval": 1}


class FabricSteps:
    """Opens, closes and numbers the steps of one Fabric, and seeds the device for each.

    Args:
        config: the options.
        sharding: of the strategy, if it shards.
        shapes: gives batches few shapes; None leaves them as they are.

    Attributes:
        config: the options.
        shapes: gives batches few shapes.
        is_launched: whether `fabric.launch()` was called.
        count: training steps done since the seed was set.
    """

    def __init__(
        self, config: XLAConfig, sharding: ModuleSharding | None = None, shapes: ShapePolicy | None = None
    ) -> None:
        self.config = config
        self.shapes = LoaderShapes(shapes, self._base_seed)
        self._sharding = sharding
        self.is_launched = False
        self.count = 0
        self._evaluated = 0
        self._seed: int | None = None
        self._runtime = get_runtime()
        self._programs: dict[tuple[str, str], StepProgram] = {}
        self._batch: Any = None
        self._optimizers: list[weakref.ref[Optimizer]] = []
        self._metrics: list[weakref.ref[Metric]] = []
        self._reads: LibraryReads | None = None

    # ---- what the loop uses --------------------------------------------------------------------

    def shaped(self, batch: Any) -> Any:
        """A batch of a loader, on the host, as the loop takes it: of a bucket's length."""
        return self.shapes.padded(batch, trains=torch.is_grad_enabled())

    def place_batch(self, batch: Any) -> None:
        """Shards a batch, or a tensor, that was moved to the device, if the strategy shards."""
        if self._sharding is not None:
            self._sharding.place_batch(batch)

    def note_batch(self, batch: Any) -> None:
        """Remembers the shapes of the loader's last batch, to explain compiles by."""
        self._batch = apply_to_collection(batch, torch.Tensor, _shape_of)

    def note_optimizer(self, optimizer: Optimizer) -> None:
        """Remembers an optimizer: whether its parameters have gradients decides the graph of a step."""
        self._optimizers.append(weakref.ref(optimizer))

    def note_module(self, module: torch.nn.Module) -> None:
        """Remembers the metrics of a module, which are restored if a step is discarded, and what its layers read."""
        self.shapes.model_is_known(module)
        self._metrics += [weakref.ref(part) for part in module.modules() if isinstance(part, Metric)]
        self._reads = reads_of_packages((), module) or self._reads

    # ---- random numbers ------------------------------------------------------------------------

    def restart(self) -> None:
        """The seed was set: steps are counted from 0."""
        self._seed = None
        self.count = self._evaluated = 0

    def random_state(self) -> dict[str, Any]:
        """What a checkpoint must hold for a resumed loop to draw the same random numbers as this one."""
        return {
            "seed": self._base_seed(),
            "step": self.count,
            "device": self._runtime.random.seed(),
            "algorithm": self._runtime.random.algorithm(),
        }

    def resume(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `random_state` returned."""
        self._seed = int(state["seed"])
        self.count, self._evaluated = int(state["step"]), 0
        self._runtime.random.set_seed(int(state["device"]))
        if "algorithm" in state:
            resume_random_algorithm(state["algorithm"])

    def _base_seed(self) -> int:
        return torch.initial_seed() if self._seed is None else self._seed

    def _step_seed(self, kind: StepKind) -> StepSeed:
        # Evaluation steps have a stream of their own, so that they do not change the training's numbers.
        micro_step = self._evaluated if kind == "eval" else 0
        return StepSeed(seed=self._base_seed(), step=self.count, micro_step=micro_step, stream=_STREAMS[kind])

    def _count(self, kind: StepKind) -> None:
        if kind == "eval":
            self._evaluated += 1
        else:
            self.count += 1
            self._evaluated = 0

    # ---- steps ---------------------------------------------------------------------------------

    def run(self, kind: StepKind, name: str, inputs: Any) -> AbstractContextManager[Any]:
        """The context in which the body of one step runs.

        Args:
            kind: whether it trains or evaluates.
            name: of the step, for messages.
            inputs: the batch, to explain compiles by; None for the loader's last one.

        Raises:
            RuntimeOrderError: Fabric is not launched.
            ConfigError: the first batch of a training cannot be split over the devices.
        """
        if not self.is_launched:
            raise RuntimeOrderError(
                f"the step {name!r} was entered outside of a launched Fabric: call fabric.launch() before the loop "
                "(it switches the process to eager mode, and lets metrics, batches and seeds work in steps)"
            )
        if self._sharding is not None and kind == "train":
            self._sharding.check_first_batch(self._batch if inputs is None else inputs)
        if in_step():
            return StepScope(name=name, config=self.config)
        if self.config.compiles_step and (kind == "train" or self.config.compile_eval):
            return self._compiled(kind, name, self._batch if inputs is None else inputs)
        return self._uncompiled(kind)

    @contextmanager
    def _compiled(self, kind: StepKind, name: str, inputs: Any) -> Iterator[None]:
        program = self._program(kind, name)
        gradients = "present" if kind == "train" and self._gradients_present() else "absent"
        metrics = MetricSnapshot(metric for metric in (found() for found in self._metrics) if metric is not None)
        seed, calls = self._step_seed(kind), program.calls
        length = self.shapes.phase(inputs, trains=kind == "train")
        try:
            with allowing_reads(self._reads), Discarding(program):
                program.open(
                    inputs=inputs,
                    phase=(f"gradients {gradients}" if kind == "train" else "evaluation") + length,
                    seed=seed,
                    where=f"step {self.count}",
                )
                with as_if_compiling():
                    yield
                program.close()
        finally:
            # An error does not tell whether the step was executed: after Ctrl-C during the compile it was.
            if program.calls > calls:
                self._count(kind)
            else:
                metrics.restore()

    @contextmanager
    def _uncompiled(self, kind: StepKind) -> Iterator[None]:
        self._runtime.random.set_seed(self._step_seed(kind).value())
        with LazyScope() if self.config.xla_mode == "lazy" else EagerScope(), as_if_compiling():
            yield
        self._count(kind)

    @contextmanager
    def own_graph(self, name: str) -> Iterator[None]:
        """A graph of its own for clipping or for the update, under dynamo; `max_graphs` is for steps."""
        program = self._program("update", name)
        with Discarding(program):
            program.open(phase=name, where=f"step {self.count}")
            yield
            program.close()

    def _program(self, kind: StepKind | Literal["update"], name: str) -> StepProgram:
        if (kind, name) not in self._programs:
            config = self.config if kind == "train" else self.config.without_graph_limits()
            if kind == "eval":
                config = replace(config, free_grads=False)
            self._programs[kind, name] = StepProgram(name, config, hint=_HINT)
        return self._programs[kind, name]

    def _gradients_present(self) -> bool:
        optimizers = (found() for found in self._optimizers)
        groups = (group for optimizer in optimizers if optimizer is not None for group in optimizer.param_groups)
        return any(parameter.grad is not None for group in groups for parameter in group["params"])


def _shape_of(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


class FabricStep(Step):
    """What `fabric.strategy.step()` returns: a context manager and decorator, which may be entered many times.

    Args:
        steps: opens and numbers it.
        kind: whether it trains or evaluates.
        name: of the step in messages and dumps; by default that of a decorated function.
        inputs: the batch, to explain compiles by; by default the loader's last one.
    """

    def __init__(self, steps: FabricSteps, kind: StepKind, *, name: str | None, inputs: Any) -> None:
        super().__init__(name=name, config=steps.config, seed=None, hint="")
        self._steps = steps
        self._kind: StepKind = kind
        self._inputs = inputs

    def scope(self) -> AbstractContextManager[Any]:
        """The context of one call of the step, with the random numbers of its number."""
        return self._steps.run(self._kind, self._name or f"{self._kind}_step", self._inputs)


def made_or_applied(step: FabricStep, function: Callable[..., Any] | None) -> Any:
    """The step itself, or the function that it decorates if it was used as a decorator without arguments.

    Raises:
        ConfigError: `function` is neither a function nor None.
    """
    if function is None:
        return step
    if not callable(function):
        raise ConfigError(f"step({function!r}): give the step's name by keyword, name={function!r}")
    return step(function)


_SEED_STREAM = 2

_launched: list[FabricSteps] = []
_lasting = ExitStack()


def begin_launch(steps: FabricSteps) -> None:
    """Launches a Fabric; the first one in the process switches it to eager mode and installs the patches.

    Args:
        steps: of the Fabric's strategy.

    Raises:
        ConfigError: another launched Fabric has other settings.
    """
    global _lasting
    check_nesting([other.config for other in _launched], steps.config)
    if not _launched:
        with ExitStack() as stack:
            stack.enter_context(around_run(steps.config))
            stack.enter_context(flops_of_devices())
            stack.enter_context(inference_mode_as_no_grad())
            stack.enter_context(metrics_without_reads())
            stack.enter_context(_uploading_batches())
            stack.enter_context(replaced(torch, "manual_seed", _seeding_device(torch.manual_seed)))
            _lasting = stack.pop_all()
    _launched.append(steps)


def end_launch(steps: FabricSteps) -> None:
    """Ends a Fabric; the last one in the process undoes what `begin_launch` did for the first one."""
    _launched.remove(steps)
    if not _launched:
        _lasting.close()


@contextmanager
def _uploading_batches() -> Iterator[None]:
    wrappers: Any = lightning.fabric.wrappers
    fabric: Any = lightning.fabric.fabric
    stock = wrappers.move_data_to_device
    with (
        replaced(wrappers, "move_data_to_device", _moving(stock, of_loader=True)),
        replaced(fabric, "move_data_to_device", _moving(stock, of_loader=False)),
    ):
        yield


def _moving(stock: Callable[..., Any], *, of_loader: bool) -> Callable[..., Any]:
    @functools.wraps(stock)
    def move_data_to_device(batch: Any, device: Any) -> Any:
        if torch.device(device).type != get_runtime().device.torch_device().type:
            return stock(batch, device)
        for steps in _launched if of_loader else ():
            batch = steps.shaped(batch)
        with uploading():
            moved = stock(batch, device)
        for steps in _launched:
            steps.place_batch(moved)
            if of_loader:
                steps.note_batch(moved)
        return moved

    return move_data_to_device


def _seeding_device(stock: Callable[..., torch.Generator]) -> Callable[..., torch.Generator]:
    """`torch.manual_seed` seeds every device but XLA's. `seed_everything` calls it."""

    @functools.wraps(stock)
    def manual_seed(seed: Any) -> torch.Generator:
        generator = stock(seed)
        if not in_step():
            get_runtime().random.set_seed(StepSeed(seed=torch.initial_seed(), step=0, stream=_SEED_STREAM).value())
        for steps in _launched:
            steps.restart()
        return generator

    return manual_seed
