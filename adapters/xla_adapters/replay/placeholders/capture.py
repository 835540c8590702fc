"""`PlaceholderCapture`: a call that is traced with placeholders, and recorded, so that later calls can be replays."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten

from xla_adapters.replay.attribute_changes import AttributesBefore
from xla_adapters.replay.call_spec import CallSpec
from xla_adapters.replay.capture import CallNotes
from xla_adapters.replay.guards.snapshot import ModuleSnapshot
from xla_adapters.replay.placeholders.traced_call import PlaceholderCall
from xla_adapters.replay.tensor_places import CannotReplay, Returned, TensorPlace
from xla_adapters.replay.traced_call import HostEffects
from xla_adapters.tracing.placeholders.program import Program
from xla_adapters.tracing.placeholders.scope import PlaceholderScope
from xla_adapters.tracing.placeholders.trace import Trace
from xla_adapters.utils.nested_values import is_simple

Outcome = PlaceholderCall | CannotReplay


class PlaceholderCapture(PlaceholderScope):
    """A `PlaceholderScope` that describes its call as a `PlaceholderCall`.

    Args:
        spec: describes the call.
        done: called with the traced call, or why there is none, once the call was executed.
        **options: as for `StepScope`.
    """

    def __init__(self, spec: CallSpec, done: Callable[[Outcome], None], **options: Any) -> None:
        super().__init__(**options)
        self._spec = spec
        self._done = done
        self._returned: dict[str, Any] = {}
        self._notes = CallNotes(spec)
        self._roles_of: list[int] = []
        self._outcome: Outcome = CannotReplay("the step computes nothing")

    def keep(self, name: str, value: Any) -> None:
        """Notes a value that the step returns, under a name."""
        self._returned[name] = value

    def returned(self) -> dict[str, list[object]]:
        """The leaves of the values that the step returns, by name."""
        return {name: tree_flatten(value)[0] for name, value in self._returned.items()}

    def _start_tracing(self) -> None:
        self._attributes_before = AttributesBefore(self._spec.owners())
        self._notes.begin(self._restores, lambda: self.is_current)
        super()._start_tracing()

    # ---- updates -------------------------------------------------------------------------------

    def _roles(self, optimizer: Optimizer) -> list[tuple[int, float]] | None:
        return self._notes.update(optimizer, single=True)

    def update_ended(self, optimizer: Optimizer) -> None:
        """Notes which numbers became arguments of the program."""
        lifting = self._lifting
        if lifting is not None and self._notes.reason is None:
            lifting.finish()
            if lifting.reason is not None:
                self._notes.reason = CannotReplay(f"{type(optimizer).__name__}: {lifting.reason}")
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
        if isinstance(self._outcome, PlaceholderCall):
            self._outcome.run = program.compiled(self.name)
        self._done(self._outcome)

    def flush(self) -> None:
        """See `PlaceholderScope`."""
        self._notes.reason = CannotReplay("a part of the step is executed operation by operation")
        super().flush()

    def _check(self, trace: Trace) -> None:
        self._notes.check(reads=self._breaks.found)
        if any(item.aliases for item in trace.inputs):
            raise CannotReplay("two tensors of the step share their memory")

    def _recorded(self, trace: Trace, program: Program) -> PlaceholderCall:
        log = self._undo_log
        reassigned = log.reassigned_buffers()
        tensors, attributes = self._attributes_before.changes(self._spec.owners())
        names = {(id(module), name) for module, name, _ in reassigned} | {(id(owner), name) for owner, name in tensors}
        names |= {(id(change.owner), change.name) for change in attributes}
        snapshot = self._notes.snapshot(names, log)
        places = self._places_read(snapshot)
        sources: list[TensorPlace | torch.Tensor] = []
        for item in trace.inputs:
            place = places.get(id(item.tensor))
            if place is None and not item.is_upload:
                shape = tuple(item.value.shape)
                raise CannotReplay(
                    f"the step uses a tensor of the shape {shape} that is in no module, optimizer or batch"
                )
            sources.append(item.value if place is None else place)
        targets = [[self._target(sources[index])] for index in program.changed]
        targets += [list(self._places_made(tensor)) for tensor in program.made]
        made = {id(tensor): len(program.changed) + index for index, tensor in enumerate(program.made)}
        assigned = [(TensorPlace("buffer", module, name), module._buffers.get(name)) for module, name, _ in reassigned]
        assigned += [(TensorPlace("attribute", owner, name), vars(owner)[name]) for owner, name in tensors]
        for place, held in assigned:
            if id(held) not in made:
                raise CannotReplay(f"{type(place.owner).__name__}.{place.name} becomes a tensor that was there before")
            targets[made[id(held)]].append(place)
        returned = {name: self._leaves(value, places, program) for name, value in self._returned.items()}
        positions = {leaf for value in returned.values() for leaf in value.leaves if isinstance(leaf, int)}
        if any(not targets[index] and index not in positions for index in range(len(program.changed), len(targets))):
            raise CannotReplay("a tensor that the step makes is kept somewhere that is not known")
        batch = set(map(id, self._spec.batch))
        leaves = [(leaf, grad) for leaf, grad in log.leaves() if id(leaf) not in batch]
        return PlaceholderCall(
            program=program.key,
            sources=sources,
            targets=targets,
            returned=returned,
            roles=self._roles_of,
            chunks=trace.numbers.chunks,
            draws=program.draws,
            before=[(leaf, grad is not None) for leaf, grad in leaves],
            dropped=[leaf for leaf, grad in leaves if grad is not None and leaf.grad is None],
            host=HostEffects(
                optimizers=self._notes.optimizers,
                attributes=attributes,
                reassigned={place.key for place, _ in assigned},
            ),
            updates=self._notes.updates,
            snapshot=snapshot,
            forms={index: (program.results[index].shape, program.results[index].dtype) for index in positions},
        )

    def _places_read(self, snapshot: ModuleSnapshot) -> dict[int, TensorPlace]:
        """The places of all tensors that the step may read, by `id`."""
        spec = self._spec
        states = (tensor for math in self._notes.optimizers for tensor in math.state_tensors())
        places = {id(tensor): TensorPlace("tensor", tensor) for tensor in (*snapshot.tensors, *states, *spec.constants)}
        batch = set(map(id, spec.tensors.batch)) - set(map(id, spec.tensors.extras))
        if not batch.isdisjoint(places):
            # The trace does not tell which of the two was read.
            raise CannotReplay("a tensor of the batch is one of the state")
        for leaf, grad in self._undo_log.leaves():
            if id(leaf) in batch and leaf.grad is not None:
                raise CannotReplay("a tensor of its batch gets a gradient in the step")
            places.setdefault(id(leaf), TensorPlace("tensor", leaf))
            if grad is not None:
                places[id(grad)] = TensorPlace("grad", leaf)
        for kind, tensors in (("extra", spec.tensors.extras), ("batch", spec.tensors.batch)):
            places |= {id(tensor): TensorPlace(kind, name=index) for index, tensor in enumerate(tensors)}
        for module, name, before in self._undo_log.reassigned_buffers():
            if before is not None:
                places[id(before)] = TensorPlace("buffer", module, name)
        for owner, name, before in self._attributes_before.tensors():
            places.setdefault(id(before), TensorPlace("attribute", owner, name))
        return places

    def _target(self, source: TensorPlace | torch.Tensor) -> TensorPlace:
        if not isinstance(source, TensorPlace):
            raise CannotReplay("the step writes into a tensor that it copied to the device")
        if source.kind == "batch":
            raise CannotReplay("the step writes into a tensor of its batch")
        return source

    def _places_made(self, tensor: torch.Tensor) -> Iterator[TensorPlace]:
        """Where a replay stores a tensor that the step makes."""
        for leaf, _ in self._undo_log.leaves():
            if leaf.grad is tensor:
                yield TensorPlace("created", leaf)

    def _leaves(self, value: Any, places: dict[int, TensorPlace], program: Program) -> Returned:
        found: list[int | TensorPlace | tuple[Any]] = []
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
            elif id(leaf) in places:
                found.append(places[id(leaf)])
            else:
                raise CannotReplay("the step returns a tensor of the host")
        return Returned(tree, tuple(found))
