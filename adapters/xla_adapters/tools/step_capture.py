"""`StepCapture`: takes the graphs of a training's steps in place of executing them, on tensors without memory."""

from __future__ import annotations

import gc
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from xla_adapters.replay.step_program import StepProgram
from xla_adapters.runtime import Runtime, get_runtime, using_runtime
from xla_adapters.runtime.transfers import note_upload
from xla_adapters.sharding import ShardingPlan
from xla_adapters.tools.tpu_compiler import ModuleForm
from xla_adapters.tracing.step_scope import StepScope
from xla_adapters.tracing.undo_log import UndoLog
from xla_adapters.utils.location import line_of_caller
from xla_adapters.utils.patching import wrapped

TRAINING, EVALUATION = "training step", "evaluation step"
# A training that never updates is ended after so many steps.
_WITHOUT_UPDATE = 200
# Tensors of a batch that are named in a description.
_LISTED = 6


@dataclass(frozen=True, kw_only=True)
class TracedStep:
    """A step, ready to be compiled.

    Attributes:
        module: a serialized HloModuleProto, or the text of an MLIR module, with the shardings of parameters and
            results, and what is donated.
        names: what each parameter of the module is, by its number: `"lm_head.weight"`, `"exp_avg of lm_head.weight"`,
            `"batch.input_ids"`. Parameters that are single numbers (the learning rate, ...) have no name.
        seconds: time of tracing and lowering.
        kind: which step of a training it is, in words.
        argument_bytes: of parameters, state and batch on one device, without padding.
        batch: of all devices, in words; empty if not known.
        form: of the module.
    """

    module: bytes
    names: dict[int, str]
    seconds: float
    kind: str = TRAINING
    argument_bytes: int = 0
    batch: str = ""
    form: ModuleForm = "hlo"


class Taken(BaseException):
    """Leaves a loop whose graphs are taken. No `Exception`, so that nobody handles it."""


class Abstract(Protocol):
    """Makes tensors without memory, and knows them."""

    def make(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A new one."""

    def knows(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor is one."""


class Delegate:
    """A part of the runtime some of whose methods are replaced in subclasses.

    Args:
        part: of the runtime.
    """

    def __init__(self, part: Any) -> None:
        self._part = part

    def __getattr__(self, name: str) -> Any:
        return getattr(self._part, name)


class AbstractTransfers(Delegate):
    """`Transfers` whose copies on the device have no memory, except those of single numbers.

    Args:
        part: of the runtime.
        abstract: makes them.
    """

    def __init__(self, part: Any, abstract: Abstract) -> None:
        super().__init__(part)
        self._abstract = abstract

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """Only single numbers are copied: steps read nothing else while they are traced."""
        if tensor.ndim == 0 and tensor.device.type != "meta":
            copy: torch.Tensor = self._part.to_device(tensor)
            return copy
        made = self._abstract.make(tensor.shape, tensor.dtype)
        if tensor.device.type == "cpu":
            # What the batch alone determines (the largest label, say) is computed on the host, as in a training.
            note_upload(tensor, made)
        return made

    def to_host(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Placeholders are zeros there: what reads them knows that values do not matter (buffers sent to a process)."""
        real = [tensor for tensor in tensors if not self._abstract.knows(tensor)]
        copies = iter(self._part.to_host(real))
        return [
            torch.zeros(tensor.shape, dtype=tensor.dtype) if self._abstract.knows(tensor) else next(copies)
            for tensor in tensors
        ]


class StepCapture(ABC):
    """Traces a training on placeholders. What it replaces is put back at the exit of `capturing`.

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
            stack.enter_context(wrapped(*around))
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
        """Further functions that are replaced: owner, name, and what makes another of the present one."""
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


def named_batch(value: Any, path: str) -> Iterable[tuple[str, torch.Tensor]]:
    """The tensors of a batch with their names in it."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from named_batch(item, f"{path}.{key}")
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from named_batch(item, f"{path}[{index}]")


def described_batch(batch: Any) -> str:
    """The tensors of a batch with their shapes: `"input_ids 8x128, labels 8x128"`."""
    found = [
        f"{name.removeprefix('batch').removeprefix('.')} {'x'.join(map(str, tensor.shape))}".strip()
        for name, tensor in named_batch(batch, "batch")
        if tensor.ndim
    ]
    return ", ".join(found[:_LISTED]) + (f" and {len(found) - _LISTED} more" if len(found) > _LISTED else "")
