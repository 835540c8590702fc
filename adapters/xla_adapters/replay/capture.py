"""`CaptureScope`: a traced call that is captured, so that later calls can be replays of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten

from xla_adapters.replay.batch_reads import NUMBERS, BatchReads, reads_of
from xla_adapters.replay.call_spec import CallSpec
from xla_adapters.replay.executable_scope import ExecutableScope
from xla_adapters.replay.guards.snapshot import ModuleSnapshot
from xla_adapters.replay.inputs_and_outputs import InputsAndOutputs, storage_of
from xla_adapters.replay.number_inputs import HostUpdate, numbers_of
from xla_adapters.replay.optimizer_host_math import OptimizerHostMath
from xla_adapters.replay.safety.allowlist import OPTIMIZERS
from xla_adapters.replay.state_values import groups
from xla_adapters.replay.tensor_places import CannotReplay, TensorPlace
from xla_adapters.replay.traced_call import GradientChanges, GraphValues, HostEffects, TracedCall
from xla_adapters.replay.verification import Verification
from xla_adapters.tracing.step_scope import StepScope
from xla_adapters.tracing.undo_log import UndoLog
from xla_adapters.utils.host_random import HostRandom


class CallNotes:
    """What is noted of a call while it is traced, to describe it for replays.

    Args:
        spec: describes the call.

    Attributes:
        optimizers: the host math of those that step, in the order of their updates.
        updates: their updates in this call.
        reason: why the call cannot be replayed, if that is known before its end.
    """

    def __init__(self, spec: CallSpec) -> None:
        self._spec = spec
        self._called: dict[int, torch.nn.Module] = {id(module): module for module in spec.modules}
        self.optimizers: list[OptimizerHostMath] = []
        self.updates: list[HostUpdate] = []
        self.reason: CannotReplay | None = None

    def begin(self, restores: ExitStack, is_current: Callable[[], bool]) -> None:
        """Notes modules that are called, as long as the step is the current one; until `restores` is closed."""
        self._watched = dict(self._spec.watched())

        def note(module: torch.nn.Module, args: Any) -> None:
            if is_current():
                self._called.setdefault(id(module), module)

        restores.callback(register_module_forward_pre_hook(note).remove)
        self._host_random = HostRandom.now()

    def update(self, optimizer: Optimizer, *, single: bool = False) -> list[tuple[int, float]] | None:
        """Computes the host math of an update that is about to begin.

        Args:
            optimizer: whose.
            single: whether it updates parameter by parameter.

        Returns:
            If it does, each number that it uses: its position among those of all updates, and its value. None if the
            update cannot be replayed.
        """
        random = HostRandom.now()
        name = type(optimizer).__name__
        try:
            if any(math.optimizer is optimizer for math in self.optimizers):
                raise CannotReplay(f"{name} steps twice in one step")
            if self._spec.strict and type(optimizer) not in OPTIMIZERS:
                raise CannotReplay(f"{name} is none of the optimizers whose updates are known")
            math = OptimizerHostMath(optimizer, single=single)
            update = math.play()
            roles = math.roles(update) if single else []
            math.find_idle_groups()
            if not random.equals(HostRandom.now()):
                raise CannotReplay(f"{name} draws random numbers on the host")
        except CannotReplay as error:
            # Another one, without a traceback: its frames would keep tensors alive.
            self.reason = CannotReplay(str(error))
            # The random numbers drawn above are drawn again by the step itself.
            random.restore()
            return None
        begin = len(numbers_of(self.updates))
        self.optimizers.append(math)
        self.updates.append(update)
        return [(begin + role, value) for role, value in roles]

    def check(self, *, reads: bool) -> None:
        """At the end of the call, whether it can be replayed.

        Args:
            reads: whether a value was read in it.

        Raises:
            CannotReplay: it cannot.
        """
        if self.reason is not None:
            raise self.reason
        if reads:
            raise CannotReplay("a value was read in the step")
        if not self._host_random.equals(HostRandom.now()):
            raise CannotReplay("the step draws random numbers on the host")
        for name, value in self._spec.watched().items():
            if value != self._watched.get(name):
                raise CannotReplay(f"the step changes {name}: {self._watched.get(name)} -> {value}")

    def snapshot(self, reassigned: set[tuple[int, str]], undo_log: UndoLog) -> ModuleSnapshot:
        """What the graph depends on, beside values of tensors.

        Args:
            reassigned: see `ModuleSnapshot`.
            undo_log: of the call.

        Raises:
            CannotReplay: a part of it cannot be compared.
        """
        found = ModuleSnapshot(
            self._called.values(), reassigned=reassigned, exempt=self._spec.exempt, strict=self._spec.strict
        )
        # Tensors that are in no module and not in the batch.
        seen = set(map(id, (*found.tensors, *self._spec.tensors.batch)))
        groups = [group["params"] for math in self.optimizers for group in math.optimizer.param_groups]
        leaves = (leaf for leaf, _ in undo_log.leaves())
        used = (*leaves, *(item for group in groups for item in group), *self._spec.constants)
        for tensor in {id(tensor): tensor for tensor in used if id(tensor) not in seen}.values():
            found.add(tensor)
        if found.reason is not None:
            raise CannotReplay(found.reason)
        return found


class CaptureScope(ExecutableScope):
    """An `ExecutableScope` that describes its call as a `TracedCall`.

    A call that cannot be captured is executed by a sync, which needs less preparation, unless its executable exists
    already.

    Args:
        spec: describes the call.
        known: the names of the step's executables; that of this call is added.
        done: called with the captured call, or why there is none, and whether the call ran one of these executables.
        verification: compares the call with its replay, if that is due.
        **options: as for `StepScope`.
    """

    def __init__(
        self,
        spec: CallSpec,
        known: set[bytes],
        done: Callable[[TracedCall | CannotReplay, bool], None],
        verification: Verification | None = None,
        **options: Any,
    ) -> None:
        super().__init__(spec, **options)
        self._executables = known
        self._done = done
        self._verification = verification
        self._notes = CallNotes(spec)
        self._given: list[tuple[TensorPlace, int]] = []
        self._before_update: set[int] = set()
        self._update_buffers: set[int] = set()

    def _start_tracing(self) -> None:
        self._notes.begin(self._restores, lambda: self.is_current)
        super()._start_tracing()
        if self._breaks.allowed_reads is not None:
            self._breaks.allowed_reads.note_reads(keeps_numbers=self._spec.keeps_numbers)
        # The results of a running execution (a batch changed on the device) get other handles when it ends.
        self._runtime.device.wait()
        tensors = self._spec.tensors
        for kind, group in (("batch", tensors.batch), ("extra", tensors.extras)):
            for index, handle in enumerate(self._runtime.lazy.handles(group)):
                self._given.append((TensorPlace(kind, name=index), handle))
        # Made here, so that the graph's input can be recognised by its buffer.
        self._seed_input = self._runtime.random.seed_input()

    def _before_tracing(self) -> None:
        super()._before_tracing()
        self._runtime.device.wait()
        self._separate_batch(self._spec.tensors.batch)

    def _separate_batch(self, batch: Sequence[torch.Tensor]) -> None:
        """Gives copies within a batch buffers of their own.

        The signature contains which tensors of a batch are the same one, but not which share a buffer.
        """
        first: dict[int, int] = {}
        owners, sharing = [], []
        for tensor, handle in zip(batch, self._runtime.lazy.handles(batch), strict=True):
            number = self._runtime.lazy.tensor_number(tensor)
            if first.setdefault(handle, number) == number:
                owners.append(self._runtime.values.snapshot(tensor))
            else:
                sharing.append(tensor)
        if sharing:
            with torch.no_grad(), torch._C.DisableTorchFunction():
                self._runtime.shared_buffers.give_own_buffers(owners, sharing)

    def update_begins(self, optimizer: Optimizer) -> None:
        """Computes the optimizer's host math."""
        self.pause_recording()
        try:
            self._notes.update(optimizer)
        finally:
            with torch._C.DisableTorchFunction():
                self._before_update = self._buffers_read()
            super().update_begins(optimizer)
            self.resume_recording()

    def update_ended(self, optimizer: Optimizer) -> None:
        """Notes which inputs of the graph only the optimizer reads."""
        with torch._C.DisableTorchFunction():
            self._update_buffers |= self._buffers_read() - self._before_update
        super().update_ended(optimizer)

    def _buffers_read(self) -> set[int]:
        """The buffers that the graph of the state and its gradients reads, as far as it is traced."""
        written = [entry.tensor for entry in self._undo_log.entries()]
        gradients = [leaf.grad for leaf, _ in self._undo_log.leaves() if leaf.grad is not None]
        pending = [
            tensor
            for tensor in (*written, *gradients)
            if torch._is_functional_tensor(tensor) and self._runtime.tracing.is_pending(tensor)
        ]
        return {item.handle for item in self._runtime.executables.inputs(pending)}

    # ---- the end -------------------------------------------------------------------------------------

    def _execute(self) -> None:
        with torch.no_grad(), torch._C.DisableTorchFunction():
            try:
                graph = self._pending(iter(()))
            except CannotReplay as error:
                self._verify(error)
                StepScope._execute(self)
                self._done(error, False)
                return
            found: TracedCall | CannotReplay
            try:
                self._notes.check(reads=self._breaks.found)
                reads = self._reads()
                found = self._captured(
                    InputsAndOutputs(
                        self._runtime, self._undo_log, self._unmoved(), self._spec, self._attributes_before, graph
                    ),
                    reads,
                )
            except CannotReplay as error:
                found = CannotReplay(str(error))
            self._verify(found)
            is_executable_kept = isinstance(found, TracedCall) or graph.name in self._executables
            if is_executable_kept:
                # Tracing has advanced the seed. The next step continues from the seed at the beginning of this one.
                self._runtime.random.set_seed(self._stream)
                name, results = graph.run(self._look_at(graph))
                self._executables.add(name)
                if isinstance(found, TracedCall):
                    found.executable = name
                    found.flops = self._graph.flops if self._graph is not None else None
                    found.remember_outputs(results)
            else:
                StepScope._execute(self)
            graph.forget()
        self._done(found, is_executable_kept)

    def _unmoved(self) -> dict[int, list[TensorPlace]]:
        """The places of the batch and the extras that are still in the buffers they were in before the step, by handle.

        A tensor may have moved to another buffer (when it was annotated, say), and then a number of the step may have
        got the address of the buffer it had.
        """
        places: dict[int, list[TensorPlace]] = {}
        for place, before in self._given:
            tensor = place.get(self._spec.tensors)
            if not self._runtime.tracing.is_pending(tensor) and self._runtime.lazy.handles([tensor]) == [before]:
                places.setdefault(before, []).append(place)
        return places

    def _verify(self, found: TracedCall | CannotReplay) -> None:
        if self._verification is not None:
            self._verification.before_execution(found, self._runtime, was_cut=self._breaks.flushed)

    def returned(self) -> dict[str, list[object]]:
        """The leaves of the values that the step returns, by name."""
        return {name: tree_flatten(value)[0] for name, value in self._returned.items()}

    def _reads(self) -> BatchReads | None:
        """What is read in the step. What it copies to the device for that counts as a part of the batch."""
        allowed_reads, batch = self._breaks.allowed_reads, self._spec.batch
        reads = reads_of(allowed_reads, batch)
        if allowed_reads is not None and allowed_reads.noted is not None:
            self._returned[NUMBERS] = allowed_reads.deferred.stacked
            uploads = [tensor for _, tensor in allowed_reads.noted.uploads]
            self._spec.tensors.batch = [*batch, *uploads]
            for index, handle in enumerate(self._runtime.lazy.handles(uploads), len(batch)):
                self._given.append((TensorPlace("batch", name=index), handle))
        return reads

    def _captured(self, places: InputsAndOutputs, reads: BatchReads | None) -> TracedCall:
        for math in self._notes.optimizers:
            places.reassigned_state(math)
            places.note(TensorPlace("tensor", owner=tensor) for tensor in math.state_tensors())
        snapshot = self._notes.snapshot(places.reassigned_names, self._undo_log)
        places.note(TensorPlace("tensor", owner=tensor) for tensor in (*self._spec.constants, *snapshot.tensors))
        returned = {name: places.returned(value) for name, value in self._returned.items()}
        (seed,) = self._runtime.lazy.handles([self._seed_input])
        numbers = set(self._runtime.lazy.handles(self._list_updates.numbers))
        sources, targets = places.sources(seed, self._update_buffers, numbers), places.targets(self._returned)
        elsewhere = places.elsewhere(sources, targets)
        donated = list(places.graph.donors)
        values = GraphValues(sources=sources, targets=targets, donated=donated, elsewhere=elsewhere, returned=returned)
        return TracedCall(
            values=values,
            gradients=GradientChanges(before=places.grads, created=places.created, dropped=places.dropped),
            host=HostEffects(
                optimizers=self._notes.optimizers, attributes=places.host_changes, reassigned=places.reassigned
            ),
            snapshot=snapshot,
            updates=self._notes.updates,
            unrepeatable=places.unrepeatable,
            sharing=groups((*map(storage_of, values.state), *map(places.storage_at, elsewhere)), {}),
            graph=places.graph.name,
            reads=reads,
        )
