"""`StepCapture`: takes the graphs of a script's steps in place of executing them, on placeholders without memory."""

from __future__ import annotations

import gc
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from xla_adapters.preflight.traced_step import TracedStep, described_batch, named_batch
from xla_adapters.replay.program import StepProgram
from xla_adapters.runtime import Runtime, get_runtime, using_runtime
from xla_adapters.sharding import ShardingPlan
from xla_adapters.tracing.step_scope import StepScope
from xla_adapters.tracing.undo_log import UndoLog
from xla_adapters.utils.location import line_of_caller
from xla_adapters.utils.patching import replaced

TRAINING, EVALUATION = "training step", "evaluation step"
# A training that never updates is ended after so many steps.
_WITHOUT_UPDATE = 200


class Taken(BaseException):
    """Leaves a loop whose graphs are taken. No `Exception`, so that nobody handles it."""


class StepCapture(ABC):
    """Traces a script on placeholders. What it replaces is put back at the exit of `capturing`.

    The graph of a step is taken where it would be executed, and its results become placeholders. So loops go on, as
    long as they read nothing from the device.

    Attributes:
        steps: what was taken.
        plan: how the model is sharded; None if it is not.
        failure: what a loop raised, also if the script handles it.
    """

    def __init__(self) -> None:
        self.steps: list[TracedStep] = []
        self.plan: ShardingPlan | None = None
        self.failure: BaseException | None = None
        self._runtime: Runtime
        self._phase = ""
        self._graphs: set[str] = set()
        self._calls = 0
        self._began = time.monotonic()
        self._batch = ""
        # Of the present batch, by the ids of its tensors on the host.
        self._on_host: dict[int, str] = {}

    @property
    def phase(self) -> str:
        """Which steps are being taken; empty outside of `taking`."""
        return self._phase

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """A context in which nothing has memory on the device, and no step is executed."""
        self._runtime = get_runtime()
        around: list[tuple[Any, str, Callable[[Any], Any]]] = [
            (StepProgram, "open", self._open),
            # Each step is traced.
            (Runtime, "replay_works", lambda _: False),
            *self._replacements(),
        ]
        with ExitStack() as stack:
            stack.enter_context(using_runtime(self._abstract(stack)))
            for owner, name, wrapped in around:
                stack.enter_context(replaced(owner, name, wrapped(vars(owner).get(name) or getattr(owner, name))))
            yield

    @contextmanager
    def taking(self, phase: str) -> Iterator[None]:
        """Takes the steps of the body, and leaves it when all kinds of them are there.

        Args:
            phase: `TRAINING` (until the first update, with the steps before it) or `EVALUATION` (the first step).
        """
        self._phase, self._calls, self._began = phase, 0, time.monotonic()
        try:
            yield
        except Taken:
            pass
        except BaseException as error:
            self.failure = error
            raise
        finally:
            self._phase = ""

    # ---- what a runtime does -----------------------------------------------------------------------

    @abstractmethod
    def _abstract(self, stack: ExitStack) -> Runtime:
        """The runtime whose tensors have no memory, until `stack` is closed."""

    @abstractmethod
    def _placeholder(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """What a copy from the host becomes."""

    @abstractmethod
    def _name_on_device(self, tensor: torch.Tensor, name: str) -> None:
        """Notes the name of a tensor of the batch that is on the device."""

    def _replacements(self) -> list[tuple[Any, str, Callable[[Any], Any]]]:
        """Further functions that are replaced: owner, name, and what makes another of the former."""
        return []

    # ---- what is replaced ------------------------------------------------------------------------

    def _copied(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor | None:
        """What `tensor.to(...)` with these arguments is; None if it is no copy to the device, or of a single number."""
        target = _target(self._runtime.device.torch_device().type, args, kwargs)
        if target is None or tensor.device.type not in ("cpu", "meta") or tensor.ndim == 0:
            return None
        dtype = next((item for item in (*args, kwargs.get("dtype")) if isinstance(item, torch.dtype)), tensor.dtype)
        placeholder = self._placeholder(tensor.shape, dtype)
        if not isinstance(tensor, torch.nn.Parameter):
            self._name_on_device(placeholder, self._on_host.get(id(tensor), f"copied at {line_of_caller()}"))
        return placeholder

    def _open(self, opened: Callable[..., None]) -> Callable[..., None]:
        def open_program(program: StepProgram, **options: Any) -> None:
            self._batch = described_batch(options.get("inputs"))
            self._on_host.clear()
            for name, tensor in named_batch(options.get("inputs"), "batch"):
                if self._runtime.device.owns(tensor):
                    self._name_on_device(tensor, name)
                else:
                    self._on_host[id(tensor)] = name
            opened(program, **options)

        return open_program

    # ---- the graph of a step ---------------------------------------------------------------------

    def _kind(self, scope: StepScope, *, updates: bool) -> str:
        if self._phase == EVALUATION or updates:
            return self._phase or TRAINING
        return f"micro batch without an update ({scope.name})"

    def _end_if_taken(self, *, updates: bool) -> None:
        """To be called after each step.

        Raises:
            Taken: it was the last one of its phase.
        """
        self._calls += 1
        if updates or self._phase == EVALUATION or self._calls > _WITHOUT_UPDATE:
            raise Taken


def named_tensors(undo_log: UndoLog, runtime: Runtime) -> Iterator[tuple[torch.Tensor, str]]:
    """The tensors on the device that are part of a model, of its gradients and its optimizers, with names for people.

    Args:
        undo_log: of the step that used them.
        runtime: of the device.
    """
    of_parameters: dict[int, str] = {}
    for root in _root_modules():
        for name, tensor in (*root.named_buffers(), *root.named_parameters()):
            if runtime.device.owns(tensor):
                of_parameters[id(tensor)] = name
                yield tensor, name
    for leaf, grad in undo_log.leaves():
        if grad is not None and runtime.device.owns(grad):
            yield grad, f"gradient of {of_parameters.get(id(leaf), 'a parameter')}"
    for optimizer in undo_log.optimizers():
        for parameter, state in optimizer.state.items():
            for key, value in state.items() if isinstance(state, dict) else ():
                if isinstance(value, torch.Tensor) and runtime.device.owns(value):
                    yield value, f"{key} of {of_parameters.get(id(parameter), 'a parameter')}"


def _target(kind: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.device | None:
    """The device of this kind that `Tensor.to` is called with; None if it is another one."""
    for value in (*args[:1], kwargs.get("device"), kwargs.get("other")):
        if isinstance(value, torch.Tensor):
            value = value.device
        if isinstance(value, (str, torch.device)) and torch.device(value).type == kind:
            return torch.device(value)
    return None


def _root_modules() -> list[torch.nn.Module]:
    """The modules of the process that are in no other one; those with the most parameters last."""
    found = [item for item in gc.get_objects() if issubclass(type(item), torch.nn.Module)]
    parts = {id(child) for module in found for child in module._modules.values() if child is not None}
    roots = [module for module in found if id(module) not in parts]
    return sorted(roots, key=lambda module: sum(1 for _ in module.parameters()))
