"""The steps of a loop of one's own under Fabric: numbered, so that each has its own random numbers."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any, Literal

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch.optim import Optimizer
from torchmetrics import Metric

from lightning_strategy.kept_metrics import KeptMetrics
from lightning_strategy.sharding import ModuleSharding
from xla_adapters import StepProgram, StepScope, StepSeed, XLAConfig, get_backend, in_step
from xla_adapters.compiling import as_if_compiling
from xla_adapters.discarding import Discarding
from xla_adapters.errors import ConfigError, RuntimeOrderError
from xla_adapters.modes import EagerScope, LazyScope
from xla_adapters.random_algorithm import resume_random_algorithm
from xla_adapters.step import Step

StepKind = Literal["train", "eval"]

_HINT = " (behind the step; what it made is there then)"
_STREAMS: dict[StepKind, int] = {"train": 0, "eval": 1}


class FabricSteps:
    """Opens, closes and numbers the steps of one Fabric.

    Args:
        config: the options.
        sharding: of the strategy, if it shards.

    Attributes:
        is_launched: whether `fabric.launch()` was called.
        count: training steps done since the seed was set.
    """

    def __init__(self, config: XLAConfig, sharding: ModuleSharding | None = None) -> None:
        self.config = config
        self._sharding = sharding
        self.is_launched = False
        self.count = 0
        self._evaluated = 0
        self._seed: int | None = None
        self._backend = get_backend()
        self._programs: dict[tuple[StepKind, str], StepProgram] = {}
        self._batch: Any = None
        self._optimizers: list[weakref.ref[Optimizer]] = []
        self._metrics: list[weakref.ref[Metric]] = []

    # ---- what there is -------------------------------------------------------------------------

    def place_batch(self, batch: Any) -> None:
        """A batch (or a tensor) was moved to the device: under sharding it is cut."""
        if self._sharding is not None:
            self._sharding.place_batch(batch)

    def note_batch(self, batch: Any) -> None:
        """The loader has handed out this batch; compiles are explained by its shapes."""
        self._batch = apply_to_collection(batch, torch.Tensor, _shape_of)

    def note_optimizer(self, optimizer: Optimizer) -> None:
        """Its gradients are accumulated from step to step, or not."""
        self._optimizers.append(weakref.ref(optimizer))

    def note_module(self, module: torch.nn.Module) -> None:
        """The metrics in it are put back when a step is discarded."""
        self._metrics += [weakref.ref(part) for part in module.modules() if isinstance(part, Metric)]

    # ---- random numbers ------------------------------------------------------------------------

    def restart(self) -> None:
        """The seed was set anew: steps are counted from 0."""
        self._seed = None
        self.count = self._evaluated = 0

    def random_state(self) -> dict[str, Any]:
        """What a checkpoint must hold for the random numbers to go on as without it."""
        return {
            "seed": self._base_seed(),
            "step": self.count,
            "device": self._backend.seed(),
            "algorithm": self._backend.random_algorithm(),
        }

    def resume(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `random_state` returned."""
        self._seed = int(state["seed"])
        self.count, self._evaluated = int(state["step"]), 0
        self._backend.set_seed(int(state["device"]))
        if "algorithm" in state:
            resume_random_algorithm(state["algorithm"])

    def _base_seed(self) -> int:
        return torch.initial_seed() if self._seed is None else self._seed

    def _step_seed(self, kind: StepKind) -> StepSeed:
        # Evaluating draws nothing from the training's stream.
        micro_step = self._evaluated if kind == "eval" else 0
        return StepSeed(seed=self._base_seed(), step=self.count, micro_step=micro_step, stream=_STREAMS[kind])

    def _passed(self, kind: StepKind) -> None:
        if kind == "eval":
            self._evaluated += 1
        else:
            self.count += 1
            self._evaluated = 0

    # ---- steps ---------------------------------------------------------------------------------

    def run(self, kind: StepKind, name: str, inputs: Any) -> AbstractContextManager[Any]:
        """What one pass through a step runs in.

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
        kept = KeptMetrics(metric for metric in (found() for found in self._metrics) if metric is not None)
        seed, passes = self._step_seed(kind), program.passes
        try:
            with Discarding(program):
                program.open(
                    inputs=inputs,
                    phase=f"gradients {gradients}" if kind == "train" else "evaluation",
                    seed=seed,
                    where=f"step {self.count}",
                )
                with as_if_compiling():
                    yield
                program.close()
        finally:
            # Not by whether there is an error: Ctrl-C while it compiles leaves the step done.
            if program.passes > passes:
                self._passed(kind)
            else:
                kept.put_back()

    @contextmanager
    def _uncompiled(self, kind: StepKind) -> Iterator[None]:
        self._backend.set_seed(self._step_seed(kind).value())
        with LazyScope() if self.config.xla_mode == "lazy" else EagerScope(), as_if_compiling():
            yield
        self._passed(kind)

    @contextmanager
    def own_graph(self, name: str) -> Iterator[None]:
        """Under dynamo: clipping and the update are graphs of their own."""
        program = self._program("train", name)
        with Discarding(program):
            program.open(phase=name, where=f"step {self.count}")
            yield
            program.close()

    def _program(self, kind: StepKind, name: str) -> StepProgram:
        if (kind, name) not in self._programs:
            config = replace(self.config, xla_mode="eager+compile")
            if kind == "eval":
                config = replace(config, max_graphs=None, free_grads=False)
            self._programs[kind, name] = StepProgram(name, config, hint=_HINT)
        return self._programs[kind, name]

    def _gradients_present(self) -> bool:
        optimizers = (found() for found in self._optimizers)
        groups = (group for optimizer in optimizers if optimizer is not None for group in optimizer.param_groups)
        return any(parameter.grad is not None for group in groups for parameter in group["params"])


class FabricStep(Step):
    """A step of the loop, as a context manager and as a decorator; may be entered many times.

    Args:
        steps: numbers it.
        kind: whether it trains or evaluates.
        name: of the step in messages and dumps; a decorated function's own by default.
        inputs: the batch, to explain compiles by; the one the loader handed out last by default.
    """

    def __init__(self, steps: FabricSteps, kind: StepKind, *, name: str | None, inputs: Any) -> None:
        super().__init__(name=name, config=steps.config, seed=None, hint="")
        self._steps = steps
        self._kind: StepKind = kind
        self._inputs = inputs

    def scope(self) -> AbstractContextManager[Any]:
        """One pass, with the random numbers of its place in the training."""
        return self._steps.run(self._kind, self._name or f"{self._kind}_step", self._inputs)


def made_or_applied(step: FabricStep, function: Callable[..., Any] | None) -> Any:
    """The step itself, or the function it is a bare decorator of.

    Raises:
        ConfigError: something else was given.
    """
    if function is None:
        return step
    if not callable(function):
        raise ConfigError(f"step({function!r}): give the step's name by keyword, name={function!r}")
    return step(function)


def _shape_of(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
