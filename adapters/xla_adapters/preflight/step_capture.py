"""`StepCapture`: takes the graphs of a script's steps in place of executing them, on placeholders without memory."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from xla_adapters.hlo.annotations import annotate
from xla_adapters.preflight.abstract_runtime import Shardings, abstract_runtime
from xla_adapters.preflight.traced_step import TracedStep, described_batch, encoded, named_batch, pending_results
from xla_adapters.replay.program import StepProgram
from xla_adapters.runtime import Runtime, TileAssignment, get_runtime, using_runtime
from xla_adapters.sharding.placement import Placement
from xla_adapters.sharding.plan import ShardingPlan
from xla_adapters.tracing.step_scope import StepScope, current_scope
from xla_adapters.tracing.undo_log import UndoLog
from xla_adapters.utils.location import line_of_caller
from xla_adapters.utils.patching import replaced

TRAINING, EVALUATION = "training step", "evaluation step"
# A training that never updates is ended after so many steps.
_WITHOUT_UPDATE = 200


class Taken(BaseException):
    """Leaves a loop whose graphs are taken. No `Exception`, so that nobody handles it."""


class StepCapture:
    """Traces a script on placeholders. What it replaces is put back at the exit of `capturing`.

    The graph of a step is lowered where it would be executed, and its results become placeholders. So loops go on, as
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
        self._shardings: Shardings
        self._phase = ""
        self._graphs: set[str] = set()
        self._calls = 0
        self._began = time.monotonic()
        self._batch = ""
        # Of the present batch by the ids of its tensors on the host; of all that was copied by handles on the device.
        self._on_host: dict[int, str] = {}
        self._on_device: dict[int, str] = {}

    @property
    def phase(self) -> str:
        """Which steps are being taken; empty outside of `taking`."""
        return self._phase

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """A context in which nothing has memory on the device, and no step is executed."""
        self._runtime = get_runtime()
        runtime, self._shardings = abstract_runtime(self._runtime, finish_step=self._finish_step)
        around: list[tuple[Any, str, Callable[[Any], Any]]] = [
            (torch.Tensor, "to", self._to),
            (StepProgram, "open", self._open),
            (Placement, "__init__", self._init_placement),
            # Each step is traced.
            (Runtime, "replay_works", lambda _: False),
        ]
        with ExitStack() as stack:
            stack.enter_context(using_runtime(runtime))
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

    # ---- what is replaced ------------------------------------------------------------------------

    def _to(self, to: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def moved(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            target = _target(args, kwargs)
            if target is None or tensor.device.type not in ("cpu", "meta") or tensor.ndim == 0:
                return to(tensor, *args, **kwargs)
            dtype = next((item for item in (*args, kwargs.get("dtype")) if isinstance(item, torch.dtype)), tensor.dtype)
            placeholder = self._shardings.make(tensor.shape, dtype)
            if not isinstance(tensor, torch.nn.Parameter):
                name = self._on_host.get(id(tensor), f"copied at {line_of_caller()}")
                self._on_device[self._handle(placeholder)] = name
            return placeholder

        return moved

    def _open(self, opened: Callable[..., None]) -> Callable[..., None]:
        def open_program(program: StepProgram, **options: Any) -> None:
            self._batch = described_batch(options.get("inputs"))
            batch = [(name, tensor) for name, tensor in named_batch(options.get("inputs"), "batch")]
            self._on_host = {id(tensor): name for name, tensor in batch if not self._runtime.device.owns(tensor)}
            self._on_device |= {self._handle(tensor): name for name, tensor in batch if id(tensor) not in self._on_host}
            opened(program, **options)

        return open_program

    def _init_placement(self, init: Callable[..., None]) -> Callable[..., None]:
        def init_placement(placement: Placement, plan: ShardingPlan, runtime: Runtime | None = None) -> None:
            self.plan = plan
            init(placement, plan, runtime)

        return init_placement

    # ---- the graph of a step ---------------------------------------------------------------------

    def _finish_step(self) -> None:
        scope = current_scope()
        outputs = pending_results(self._runtime)
        if scope is None or not outputs:
            return
        undo_log = scope.undo_logs()[-1]
        updates = bool(undo_log.optimizers())
        self._calls += 1
        tiles = self._take(scope, undo_log, outputs, self._kind(scope, updates=updates))
        if updates or self._phase == EVALUATION or self._calls > _WITHOUT_UPDATE:
            raise Taken
        # The results, as placeholders: a micro batch is done.
        values = [
            self._shardings.make(tensor.shape, tensor.dtype, tiles.get(number)) for number, tensor in outputs.items()
        ]
        # Kernels in C++ (batch_norm) hold some results without the wrapper.
        inner = [
            self._runtime.lazy.inner(item) if torch._is_functional_tensor(item) else item for item in outputs.values()
        ]
        self._runtime.lazy.fill(inner, values)

    def _kind(self, scope: StepScope, *, updates: bool) -> str:
        if self._phase == EVALUATION or updates:
            return self._phase or TRAINING
        return f"micro batch without an update ({scope.name})"

    def _take(
        self, scope: StepScope, undo_log: UndoLog, outputs: Mapping[int, torch.Tensor], kind: str
    ) -> dict[int, TileAssignment | None]:
        """Lowers the graph, unless it is known; returns how its results are cut, by number, where that is known."""
        runtime, shardings = self._runtime, self._shardings
        inputs = shardings.all()
        former = {runtime.lazy.tensor_number(entry.tensor): entry.former for entry in undo_log.entries()}
        former = {number: value for number, value in former.items() if number in outputs}
        held = {number: self._handle(value) for number, value in former.items()}
        inputs |= {held[number]: value for number, value in former.items()}
        tiles = {
            number: shardings.of(inputs[handle]) for number, handle in held.items() if shardings.knows(inputs[handle])
        }
        updated = dict(tiles)
        for leaf, _ in undo_log.leaves():
            if leaf.grad is not None and runtime.tracing.is_pending(leaf.grad):
                # The compiler cuts a new gradient as its parameter.
                tiles[runtime.lazy.tensor_number(leaf.grad)] = _tiles_of_leaf(leaf, undo_log, shardings)
        graph = runtime.tracing.graph_hash(list(outputs.values()))
        if graph in self._graphs:
            return tiles
        self._graphs.add(graph)
        module, numbers = runtime.abstract.lower(list(outputs.values()), list(inputs.values()))
        places = {handle: number for handle, number in zip(inputs, numbers, strict=True) if number is not None}
        annotated = annotate(
            module,
            {number: encoded(shardings.of(inputs[h])) for h, number in places.items() if shardings.knows(inputs[h])},
            {position: encoded(tiles[number]) for position, number in enumerate(outputs) if updated.get(number)},
            {places[handle] for handle in held.values() if handle in places},
        )
        names = self._named(undo_log, inputs)
        self.steps.append(
            TracedStep(
                module=annotated,
                names={number: names[handle] for handle, number in places.items() if handle in names},
                seconds=time.monotonic() - self._began,
                kind=kind,
                argument_bytes=sum(_bytes(inputs[handle], shardings) for handle in places),
                batch=self._batch,
            )
        )
        return tiles

    # ---- names -----------------------------------------------------------------------------------

    def _named(self, undo_log: UndoLog, inputs: Mapping[int, torch.Tensor]) -> dict[int, str]:
        """Names of inputs by their handles."""
        values = {id(entry.tensor): self._handle(entry.former) for entry in undo_log.entries()}

        def handle(tensor: torch.Tensor) -> int:
            return values.get(id(tensor)) or self._handle(tensor)

        names = {made: name for made, name in self._on_device.items() if made in inputs}
        of_parameters: dict[int, str] = {}
        for root in _root_modules():
            for name, tensor in (*root.named_buffers(), *root.named_parameters()):
                if self._runtime.device.owns(tensor):
                    of_parameters[id(tensor)] = names[handle(tensor)] = name
        for leaf, grad in undo_log.leaves():
            if grad is not None and self._runtime.device.owns(grad):
                names[handle(grad)] = f"gradient of {of_parameters.get(id(leaf), 'a parameter')}"
        for optimizer in undo_log.optimizers():
            for parameter, state in optimizer.state.items():
                for key, value in state.items() if isinstance(state, dict) else ():
                    if isinstance(value, torch.Tensor) and self._runtime.device.owns(value):
                        names[handle(value)] = f"{key} of {of_parameters.get(id(parameter), 'a parameter')}"
        return names

    def _handle(self, tensor: torch.Tensor) -> int:
        """The handle of a value; 0 of one that is still to be computed."""
        return 0 if self._runtime.tracing.is_pending(tensor) else self._runtime.lazy.handles([tensor])[0]


def _tiles_of_leaf(leaf: torch.Tensor, undo_log: UndoLog, shardings: Shardings) -> TileAssignment | None:
    """How a parameter is cut, also one that the step has updated."""
    value = next((entry.former for entry in undo_log.entries() if entry.tensor is leaf), leaf)
    return shardings.of(value) if shardings.knows(value) else None


def _target(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.device | None:
    """The XLA device that `Tensor.to` is called with; None if it is another one."""
    for value in (*args[:1], kwargs.get("device"), kwargs.get("other")):
        if isinstance(value, torch.Tensor):
            value = value.device
        if isinstance(value, (str, torch.device)) and torch.device(value).type == "xla":
            return torch.device(value)
    return None


def _bytes(tensor: torch.Tensor, shardings: Shardings) -> int:
    """On one device."""
    tiles = shardings.of(tensor) if shardings.knows(tensor) else None
    counts = tiles.counts if tiles is not None else (1,) * tensor.ndim
    sizes = (-(-size // count) for size, count in zip(tensor.shape, counts, strict=True))
    return math.prod(sizes) * tensor.element_size()


def _root_modules() -> list[torch.nn.Module]:
    """The modules of the process that are in no other one; those with the most parameters last."""
    found = [item for item in gc.get_objects() if issubclass(type(item), torch.nn.Module)]
    parts = {id(child) for module in found for child in module._modules.values() if child is not None}
    roots = [module for module in found if id(module) not in parts]
    return sorted(roots, key=lambda module: sum(1 for _ in module.parameters()))
