"""`PlaceholderCapture`: a call that is traced with placeholders, and recorded, so that later calls can be replays."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten

from xla_adapters.replay.attribute_changes import BoundState
from xla_adapters.replay.call_spec import CallSpec
from xla_adapters.replay.capture import loose_tensors
from xla_adapters.replay.guards.snapshot import ModuleSnapshot
from xla_adapters.replay.number_inputs import Update
from xla_adapters.replay.optimizer_host_math import OptimizerHostMath
from xla_adapters.replay.placeholders.traced_call import HostOptimizers, RecordedCall
from xla_adapters.replay.safety.allowlist import OPTIMIZERS
from xla_adapters.replay.tensor_places import CannotReplay, Kept, Slot
from xla_adapters.tracing.placeholders.program import Program
from xla_adapters.tracing.placeholders.scope import PlaceholderScope
from xla_adapters.tracing.placeholders.trace import Trace
from xla_adapters.utils.host_random import HostRandom
from xla_adapters.utils.nested_values import is_simple

Outcome = RecordedCall | CannotReplay


class PlaceholderCapture(PlaceholderScope):
    """A `PlaceholderScope` that describes its call as a `RecordedCall`.

    Args:
        spec: describes the call.
        done: called with the recorded call, or why there is none, once the call was executed.
        **options: as for `StepScope`.
    """

    def __init__(self, spec: CallSpec, done: Callable[[Outcome], None], **options: Any) -> None:
        super().__init__(**options)
        self._spec = spec
        self._done = done
        self._kept: dict[str, Any] = {}
        self._called: dict[int, torch.nn.Module] = {id(module): module for module in spec.modules}
        self._optimizers: list[OptimizerHostMath] = []
        self._updates: list[Update] = []
        self._roles_of: list[int] = []
        self._obstacle: CannotReplay | None = None
        self._outcome: Outcome = CannotReplay("the step computes nothing")

    def keep(self, name: str, value: Any) -> None:
        """Notes a value that the step returns, under a name."""
        self._kept[name] = value

    def returned(self) -> dict[str, list[object]]:
        """The leaves of the values that the step returns, by name."""
        return {name: tree_flatten(value)[0] for name, value in self._kept.items()}

    def _start_tracing(self) -> None:
        self._watched = dict(self._spec.watched())
        self._bound = BoundState(self._spec.owners())
        self._restores.callback(register_module_forward_pre_hook(self._note_module).remove)
        self._host_random = HostRandom.now()
        super()._start_tracing()

    def _note_module(self, module: torch.nn.Module, args: Any) -> None:
        if self.is_current:
            self._called.setdefault(id(module), module)

    # ---- updates -------------------------------------------------------------------------------

    def _roles(self, optimizer: Optimizer) -> list[tuple[int, float]] | None:
        random = HostRandom.now()
        begin = sum(len(update.numbers) for update in self._updates)
        try:
            if any(math.optimizer is optimizer for math in self._optimizers):
                raise CannotReplay(f"{type(optimizer).__name__} steps twice in one step")
            if self._spec.strict and type(optimizer) not in OPTIMIZERS:
                raise CannotReplay(f"{type(optimizer).__name__} is none of the optimizers whose updates are known")
            math = OptimizerHostMath(optimizer, single=True)
            update = math.play()
            roles = math.roles(update)
            math.find_idle_groups()
            if not random.equals(HostRandom.now()):
                raise CannotReplay(f"{type(optimizer).__name__} draws random numbers on the host")
        except CannotReplay as error:
            self._obstacle = error
            random.restore()
            return None
        self._optimizers.append(math)
        self._updates.append(update)
        return [(begin + role, value) for role, value in roles]

    def update_ended(self, optimizer: Optimizer) -> None:
        """Notes which numbers became arguments of the program."""
        lifting = self._lifting
        if lifting is not None and self._obstacle is None:
            lifting.finish()
            if lifting.obstacle is not None:
                self._obstacle = CannotReplay(f"{type(optimizer).__name__}: {lifting.obstacle}")
            self._roles_of += sorted(lifting.arguments, key=lifting.arguments.__getitem__)
        super().update_ended(optimizer)

    # ---- the end -------------------------------------------------------------------------------

    def _before_run(self, trace: Trace, program: Program) -> None:
        try:
            self._check(trace)
            self._outcome = self._recorded(trace, program)
            self._outcome.told_ranks = self.told_ranks
        except CannotReplay as error:
            self._outcome = error

    def _ran(self, trace: Trace, program: Program) -> None:
        if isinstance(self._outcome, RecordedCall):
            self._outcome.run = program.compiled(self.name)
        self._done(self._outcome)

    def flush(self) -> None:
        """See `PlaceholderScope`."""
        self._obstacle = CannotReplay("a part of the step is executed operation by operation")
        super().flush()

    def _check(self, trace: Trace) -> None:
        if self._obstacle is not None:
            raise self._obstacle
        if self._breaks.found:
            raise CannotReplay("a value was read in the step")
        if not self._host_random.equals(HostRandom.now()):
            raise CannotReplay("the step draws random numbers on the host")
        for name, value in self._spec.watched().items():
            if value != self._watched.get(name):
                raise CannotReplay(f"the step changes {name}: {self._watched.get(name)} -> {value}")
        if any(item.twins for item in trace.adopted):
            raise CannotReplay("two tensors of the step share their memory")

    def _recorded(self, trace: Trace, program: Program) -> RecordedCall:
        log = self._undo_log
        rebound = log.rebound_buffers()
        bound, attributes = self._bound.changes(self._spec.owners())
        names = {(id(module), name) for module, name, _ in rebound} | {(id(owner), name) for owner, name in bound}
        snapshot = ModuleSnapshot(
            self._called.values(),
            rebound=names | {(id(change.owner), change.name) for change in attributes},
            exempt=self._spec.exempt,
            strict=self._spec.strict,
        )
        for tensor in loose_tensors(snapshot, self._spec, self._optimizers, self._undo_log):
            snapshot.add(tensor)
        if snapshot.obstacle is not None:
            raise CannotReplay(snapshot.obstacle)
        slots = self._slots(snapshot)
        slots |= {id(before): Slot("buffer", module, name) for module, name, before in rebound if before is not None}
        for owner, name, before in self._bound.tensors():
            slots.setdefault(id(before), Slot("bound", owner, name))
        sources: list[Slot | torch.Tensor] = []
        for item in trace.adopted:
            slot = slots.get(id(item.tensor))
            if slot is None and not item.is_upload:
                shape = tuple(item.value.shape)
                raise CannotReplay(
                    f"the step uses a tensor of the shape {shape} that is in no module, optimizer or batch"
                )
            sources.append(item.value if slot is None else slot)
        targets = [[self._target(sources[index])] for index in program.changed]
        targets += [list(self._places(tensor)) for tensor in program.made]
        made = {id(tensor): len(program.changed) + index for index, tensor in enumerate(program.made)}
        places = [(Slot("buffer", module, name), module._buffers.get(name)) for module, name, _ in rebound]
        places += [(Slot("bound", owner, name), vars(owner)[name]) for owner, name in bound]
        for slot, held in places:
            if id(held) not in made:
                raise CannotReplay(f"{type(slot.owner).__name__}.{slot.name} becomes a tensor that was there before")
            targets[made[id(held)]].append(slot)
        kept = {name: self._leaves(value, slots, program) for name, value in self._kept.items()}
        returned = {leaf for value in kept.values() for leaf in value.leaves if isinstance(leaf, int)}
        if any(not targets[index] and index not in returned for index in range(len(program.changed), len(targets))):
            raise CannotReplay("a tensor that the step makes is kept somewhere that is not known")
        batch = set(map(id, self._spec.batch))
        leaves = [(leaf, grad) for leaf, grad in log.leaves() if id(leaf) not in batch]
        return RecordedCall(
            program=program.key,
            sources=sources,
            targets=targets,
            kept=kept,
            roles=self._roles_of,
            chunks=trace.numbers.chunks,
            draws=program.draws,
            before=[(leaf, grad is not None) for leaf, grad in leaves],
            dropped=[leaf for leaf, grad in leaves if grad is not None and leaf.grad is None],
            host=HostOptimizers(self._optimizers),
            updates=self._updates,
            snapshot=snapshot,
            attributes=attributes,
            rebound={slot.key for slot, _ in places},
            forms={index: (program.results[index].shape, program.results[index].dtype) for index in returned},
        )

    def _slots(self, snapshot: ModuleSnapshot) -> dict[int, Slot]:
        """The slots of all tensors that the step may read, by `id`."""
        spec = self._spec
        states = (tensor for math in self._optimizers for tensor in math.state_tensors())
        slots = {id(tensor): Slot("tensor", tensor) for tensor in (*snapshot.tensors, *states, *spec.constants)}
        batch = set(map(id, spec.tensors.batch)) - set(map(id, spec.tensors.extras))
        if not batch.isdisjoint(slots):
            # The trace does not tell which of the two was read.
            raise CannotReplay("a tensor of the batch is one of the state")
        for leaf, grad in self._undo_log.leaves():
            if id(leaf) in batch and leaf.grad is not None:
                raise CannotReplay("a tensor of its batch gets a gradient in the step")
            slots.setdefault(id(leaf), Slot("tensor", leaf))
            if grad is not None:
                slots[id(grad)] = Slot("grad", leaf)
        for kind, tensors in (("extra", spec.tensors.extras), ("batch", spec.tensors.batch)):
            slots |= {id(tensor): Slot(kind, name=index) for index, tensor in enumerate(tensors)}
        return slots

    def _target(self, source: Slot | torch.Tensor) -> Slot:
        if not isinstance(source, Slot):
            raise CannotReplay("the step writes into a tensor that it copied to the device")
        if source.kind == "batch":
            raise CannotReplay("the step writes into a tensor of its batch")
        return source

    def _places(self, tensor: torch.Tensor) -> Iterator[Slot]:
        """Where a replay stores a tensor that the step makes."""
        for leaf, _ in self._undo_log.leaves():
            if leaf.grad is tensor:
                yield Slot("created", leaf)

    def _leaves(self, value: Any, slots: dict[int, Slot], program: Program) -> Kept:
        found: list[int | Slot | tuple[Any]] = []
        leaves, tree = tree_flatten(value)
        for leaf in leaves:
            if not isinstance(leaf, torch.Tensor):
                if not is_simple(leaf):
                    raise CannotReplay(f"the step returns a {type(leaf).__name__}")
                found.append((leaf,))
                continue
            index = next((at for at, made in enumerate(program.made) if made is leaf), None)
            if index is not None:
                found.append(len(program.changed) + index)
            elif id(leaf) in slots:
                found.append(slots[id(leaf)])
            else:
                raise CannotReplay("the step returns a tensor of the host")
        return Kept(tree, tuple(found))
