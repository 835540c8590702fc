"""`Recording`: one pass as a call of its executable, and what the call depends on."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from itertools import repeat
from operator import attrgetter, is_, is_not
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard

import torch

from xla_adapters.backend import Backend
from xla_adapters.packed_gradients import PackedGradients
from xla_adapters.packed_state import PackedState, unpack, unpack_rows
from xla_adapters.replay.bound import HostChange
from xla_adapters.replay.code_facts import CodeFacts
from xla_adapters.replay.errors import CannotReplay
from xla_adapters.replay.facts import ModuleFacts
from xla_adapters.replay.foresight import Update
from xla_adapters.replay.glance import Glance
from xla_adapters.replay.held import HeldValues
from xla_adapters.replay.number import Number, cast
from xla_adapters.replay.own_buffers import copies_of_taken, give_own_buffers
from xla_adapters.replay.places import Kept, PassTensors, Place
from xla_adapters.replay.run_ahead import RunAhead
from xla_adapters.replay.tensor_facts import TensorFacts
from xla_adapters.replay.update import UpdateRecipe

if TYPE_CHECKING:
    from xla_adapters.replay.together import Form

# Numbers that operators bring along by themselves (the alpha of an addition): one that is equal to a number of the
# optimizer may be either.
_OPERATORS_OWN = (0.0, 1.0, -1.0, 2.0, 0.5)


_grad = attrgetter("grad")


@dataclass
class Recording:
    """What a traced pass did, as far as a replay does it.

    Attributes:
        sources: for each input of the graph a place, `"seed"`, or a number.
        targets: for each output the places it is written to (a gradient is bound anew if it was absent).
        fresh_grads: which `"grad"` targets get a new tensor.
        dropped_grads: leaves whose gradient is gone after the step.
        grads: leaves with and without a gradient before the step.
        donated: positions in `sources` whose buffers the executable takes.
        kept: values the step hands out, by name.
        recipes: of the optimizers, in the order of their updates.
        updates: what they computed in this pass, or in the last replay of it.
        facts: of the modules.
        loose: of parameters that are in no module.
        code: of the modules, as far as it is the user's.
        host_changes: plain attributes that the step changes.
        rebound: the keys of `"bound"` places that get a new tensor.
        unrepeatable: what this one pass did that a replay cannot; empty if nothing.
        executable: its name.
        outputs: of the last pass, those that the step hands out or binds anew, to make stand-ins from.
        graph: its text, if several passes are to be one executable.
        form: how they are; or why they cannot be.
        packed: the optimizers' state, if the executable has it in rows.
        gradients: those that the pass leaves behind, likewise.
    """

    sources: list[Place | str | Number]
    targets: list[list[Place]]
    fresh_grads: set[int]
    dropped_grads: list[torch.Tensor]
    grads: list[tuple[torch.Tensor, bool]]
    donated: list[int]
    kept: dict[str, Kept]
    recipes: list[UpdateRecipe]
    updates: list[Update]
    facts: list[ModuleFacts]
    loose: list[TensorFacts]
    code: CodeFacts
    host_changes: list[HostChange]
    rebound: set[tuple[str, int, str | int]]
    unrepeatable: str
    executable: bytes = b""
    outputs: dict[int, torch.Tensor] = field(default_factory=dict)
    graph: bytes = b""
    form: Form | str | None = None
    packed: PackedState | None = None
    gradients: PackedGradients | None = None
    compiled: int = 0
    uses: int = 0
    _held: HeldValues | None = None
    _state: list[torch.Tensor] = field(default_factory=list)
    _ids: frozenset[int] = frozenset()
    _read: list[tuple[int, int]] = field(default_factory=list)
    _order: list[int] = field(default_factory=list)
    _changing: list[tuple[int, Place | str | Number]] = field(default_factory=list)
    _written: list[int] = field(default_factory=list)
    _outputs: list[int] = field(default_factory=list)
    _placed: list[tuple[int, Place]] = field(default_factory=list)
    _gradient_rows: list[int] = field(default_factory=list)
    _accumulated: list[torch.Tensor] = field(default_factory=list)
    _given: list[Place] = field(default_factory=list)
    _parameters: list[torch.Tensor] = field(default_factory=list)
    _leaves_with: list[torch.Tensor] = field(default_factory=list)
    _leaves_without: list[torch.Tensor] = field(default_factory=list)
    _layouts: list[str] = field(default_factory=list)
    _glance: Glance | None = None
    _forms: dict[Hashable, list[int]] = field(default_factory=dict)
    _ahead: RunAhead = field(default_factory=RunAhead)

    # ---- proof -------------------------------------------------------------------------------------

    def difference(self, other: Recording) -> str | None:
        """How this pass differs from an earlier one, in words; None if both are the same call."""
        if self.executable != other.executable:
            return "the graph is another one than in the pass before"
        if [_key(source) for source in self.sources] != [_key(source) for source in other.sources]:
            return "the inputs of the graph come from other places than in the pass before"
        if _keys(self.targets) != _keys(other.targets) or self.fresh_grads != other.fresh_grads:
            return "the results of the graph go to other places than in the pass before"
        if self.donated != other.donated or _ids(self.dropped_grads) != _ids(other.dropped_grads):
            return "other values are given up than in the pass before"
        if [(id(leaf), was) for leaf, was in self.grads] != [(id(leaf), was) for leaf, was in other.grads]:
            return "other gradients are there than before the last pass"
        if [update.operators for update in self.updates] != [update.operators for update in other.updates]:
            return "the optimizer took another course than in the pass before"
        if self.kept.keys() != other.kept.keys() or any(
            kept.spec != other.kept[name].spec
            or [_key(leaf) for leaf in kept.leaves] != [_key(leaf) for leaf in other.kept[name].leaves]
            for name, kept in self.kept.items()
        ):
            return "the step hands out other things than in the pass before"
        if self.rebound != other.rebound or len(self.host_changes) != len(other.host_changes):
            return "other attributes were changed than in the pass before"
        for mine, theirs in zip(self.host_changes, other.host_changes, strict=True):
            if not mine.agree(theirs):
                return f"{type(mine.owner).__name__}.{mine.name} was changed otherwise than in the pass before"
        if len(self.facts) != len(other.facts):
            return "other modules took part than in the pass before"
        return next((change for fact in other.facts if (change := fact.changed())), other.code.changed())

    def numbers(self) -> list[Number]:
        """The inputs that began as Python numbers."""
        return [source for source in self.sources if isinstance(source, Number)]

    def resolve_numbers(self, other: Recording, mine: Sequence[float], theirs: Sequence[float]) -> str | None:
        """Finds out which numbers of the graph are the optimizer's, from two passes; why not, if it cannot be told.

        Args:
            other: the pass before, which does not differ.
            mine: the values of `numbers()`.
            theirs: those of the pass before.
        """
        first, second = _numbers(other.updates), _numbers(self.updates)
        for number, now, before in zip(self.numbers(), mine, theirs, strict=True):
            dtype = number.value.dtype
            number.present = now
            number.roles = tuple(
                role
                for role in range(len(second) if number.of_update else 0)
                if cast(second[role], dtype) == now and cast(first[role], dtype) == before
            )
            if not number.roles and now != before:
                return f"a Python number in the graph changes from pass to pass ({before:g}, {now:g})"
            number.constant = not number.roles or (now == before and now in _OPERATORS_OWN)
        return None

    def shares_otherwise(self, updates: Sequence[Update]) -> bool:
        """Whether a trace with these numbers may have other inputs than this one: equal numbers share one."""
        numbers = _numbers(updates)
        try:
            values = [(number.next(numbers), number.value.dtype) for number in self.numbers()]
        except CannotReplay:
            return True
        return len(set(values)) < len(values)

    def ready(self, backend: Backend) -> None:
        """Makes the recording fit to be run."""
        self.compiled = backend.executables_compiled()
        read = [(index, source.owner) for index, source in enumerate(self.sources) if _is_fixed(source)]
        self._changing = [(index, source) for index, source in enumerate(self.sources) if not _is_fixed(source)]
        targets = [(index, place) for index, places in enumerate(self.targets) for place in places]
        written = [(index, place.owner) for index, place in targets if place.kind == "tensor"]
        self._placed = [(index, place) for index, place in targets if place.kind not in ("tensor", "gradients")]
        self._gradient_rows = [index for index, place in targets if place.kind == "gradients"]
        used = [place for _, place in self._placed if place.kind == "grad" and id(place.owner) not in self.fresh_grads]
        used += [source for source in self.sources if isinstance(source, Place) and source.kind == "grad"]
        self._given = [
            source
            for _, source in self._changing
            if isinstance(source, Place) and source.kind not in ("grad", "packed")
        ]
        self._accumulated = list({id(place.owner): place.owner for place in used}.values())
        self._state = list({id(tensor): tensor for _, tensor in (*read, *written)}.values())
        positions = {id(tensor): position for position, tensor in enumerate(self._state)}
        self._ids = frozenset(positions)
        self._read = [(index, positions[id(tensor)]) for index, tensor in read]
        self._order = [0] * len(self.sources)
        for index, position in self._read:
            self._order[index] = position
        self._written = [positions[id(tensor)] for _, tensor in written]
        self._outputs = [index for index, _ in written]
        self._parameters = [parameter for fact in self.facts for parameter in fact.parameters()]
        self._leaves_with = [leaf for leaf, was_there in self.grads if was_there]
        self._leaves_without = [leaf for leaf, was_there in self.grads if not was_there]
        self._layouts = backend.layouts(self._state) if backend.is_spmd() else []

    # ---- replay ------------------------------------------------------------------------------------

    def obstacle(self, backend: Backend, set_modes: Callable[[], object] | None) -> str | None:
        """Why the next pass is another call than this one, in words; None if it is the same.

        Args:
            backend: the seam.
            set_modes: what the step does first to put its modules into their modes.
        """
        change = self._changed_module()
        if change is not None and set_modes is not None:
            set_modes()
            change = self._changed_module()
        if change is None:
            change = self.code.changed()
        if change is not None:
            return change
        for traits in self.loose:
            change = traits.changed()
            if change is not None:
                return f"{change} of a parameter that is in no module changed"
        for recipe in self.recipes:
            change = recipe.obstacle()
            if change is not None:
                return change
        for host_change in self.host_changes:
            change = host_change.obstacle()
            if change is not None:
                return change
        if self.packed is not None and (change := self.packed.obstacle()) is not None:
            return change
        if not _have_none(self._leaves_without):
            return "a gradient is present that was not when the step was recorded"
        if not all(map(is_not, map(_grad, self._leaves_with), repeat(None))):
            return "a gradient is absent that was not when the step was recorded"
        if self._layouts and backend.layouts(self._state) != self._layouts:
            return "a tensor of the state lies otherwise on the devices"
        if backend.executables_compiled() - self.compiled > backend.executables_kept() // 2:
            return "so much else was compiled that the executable may be gone"
        return None

    def _changed_module(self) -> str | None:
        if self._glance is not None and not self._glance.touched():
            return None
        change = next((change for fact in self.facts if (change := fact.changed())), None)
        if change is None:
            # What was touched does not matter, or is the same again.
            self._glance = Glance(self.facts)
        return change

    def without_gradients(self) -> bool:
        """Whether no parameter of the modules has a gradient."""
        with torch._C.DisableTorchFunction():
            return _have_none(self._parameters)

    def new_numbers(self, updates: Sequence[Update]) -> list[tuple[Number, float]]:
        """The inputs that began as numbers and are others in the pass to come, with their values.

        Raises:
            CannotReplay: numbers that shared an input differ now.
        """
        numbers = _numbers(updates)
        new: list[tuple[Number, float]] = []
        for _, source in self._changing:
            if isinstance(source, Number) and source.roles:
                value = source.next(numbers)
                if value != source.present:
                    new.append((source, value))
        return new

    def inputs(self, tensors: PassTensors, new: Sequence[tuple[Number, float]], backend: Backend) -> list[torch.Tensor]:
        """The inputs of the graph for this pass.

        Args:
            tensors: of the pass.
            new: see `new_numbers`.
            backend: the seam.
        """
        uploads = backend.upload_numbers([(value, number.value.dtype) for number, value in new])
        for (number, value), upload in zip(new, uploads, strict=True):
            number.value, number.present = upload, value
        self.unpack(tensors)
        if self.gradients is not None:
            self.gradients.begin_pass()
        if self.packed is not None:
            self.packed.pack()
        if self._held is None:
            self._held = HeldValues(self._state, backend)
        values = self._held.present()
        # The places of those that change get any value first.
        found: list[Any] = list(map(values.__getitem__, self._order)) if values else [None] * len(self.sources)
        for index, source in self._changing:
            if isinstance(source, Number):
                found[index] = source.value
            elif isinstance(source, Place):
                found[index] = self._value(source, tensors, backend)
            else:
                found[index] = backend.seed_input()
        return found

    def unpack(self, tensors: PassTensors) -> None:
        """Has tensors hold their own numbers that lie where the pass reads or adds to, and are another step's."""
        unpack_rows(self._ids)
        unpack(map(_grad, self._accumulated))
        unpack([place.get(tensors) for place in self._given])

    @staticmethod
    def _value(place: Place, tensors: PassTensors, backend: Backend) -> torch.Tensor:
        tensor = place.get(tensors)
        # What is updated goes in as its value, which can outlive the update (see `Backend.run_graph`).
        return tensor if place.kind == "batch" else backend.snapshot(tensor)

    @property
    def rows_held(self) -> AbstractContextManager[object]:
        """For the time in which the executable has the optimizers' state: other threads wait for it."""
        return nullcontext() if self.packed is None else self.packed.lock

    def run(self, inputs: Sequence[torch.Tensor], backend: Backend) -> list[torch.Tensor]:
        """Calls the executable; returns its outputs."""
        return backend.run_graph(self.executable, inputs, taken=[inputs[index] for index in self.donated])

    def take_outputs(self, results: Sequence[torch.Tensor]) -> None:
        """Remembers outputs of a pass; no others, which would be kept alive until the next pass is over."""
        self.outputs = {index: results[index] for index in self._remembered}

    @cached_property
    def _remembered(self) -> list[int]:
        kept = {leaf for value in self.kept.values() for leaf in value.leaves if isinstance(leaf, int)}
        places = ((index, place) for index, places in enumerate(self.targets) for place in places)
        return sorted(kept | {at for at, place in places if place.kind == "buffer" or place.key in self.rebound})

    def write_back(self, results: Sequence[torch.Tensor], tensors: PassTensors, backend: Backend) -> None:
        """Puts the outputs of the executable where the step puts them."""
        assert self._held is not None
        self._held.write(self._written, list(map(backend.inner, map(results.__getitem__, self._outputs))))
        others: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        for index, place in self._placed:
            if place.kind == "grad" and id(place.owner) in self.fresh_grads:
                place.owner.grad = results[index]
            elif place.kind == "buffer":
                place.owner._buffers[place.name] = results[index]
            elif place.kind == "state":
                place.owner[place.name] = results[index]
            elif place.key in self.rebound:
                setattr(place.owner, str(place.name), results[index])
            else:
                others.append(place.get(tensors))
                values.append(results[index])
        if self.gradients is not None:
            self.gradients.leave([results[index] for index in self._gradient_rows])
        backend.write(others, values)
        self._ahead.written(lambda: self._forget_writes(others, backend))
        for leaf in self.dropped_grads:
            leaf.grad = None
        for change in self.host_changes:
            change.apply()

    def _forget_writes(self, others: Sequence[torch.Tensor], backend: Backend) -> None:
        assert self._held is not None
        self._held.forget_writes()
        backend.forget_writes(others)

    def own_buffers(self, inputs: list[torch.Tensor], tensors: PassTensors, backend: Backend) -> None:
        """Gives those inputs a buffer of their own that share one: the executable takes it."""
        shared = backend.shared([inputs[index] for index in self.donated])
        if shared:
            self._own_state(shared, inputs, tensors, backend)
        # Whoever is given as the batch may be the state by another name.
        others = [index for index, source in self._changing if isinstance(source, Place) and source.kind == "batch"]
        given = {index: inputs[index] for index in others}
        for index, copy in copies_of_taken(self.taken_like(given.values(), inputs), given, backend).items():
            inputs[index] = copy

    def taken_like(self, given: Iterable[torch.Tensor], inputs: _ByPosition) -> list[torch.Tensor]:
        """Those inputs that may be one of these tensors, and whose buffers the executable takes."""
        if not self._forms:
            for index in self.donated:
                self._forms.setdefault(_form(inputs[index]), []).append(index)
        return [inputs[index] for form in set(map(_form, given)) for index in self._forms.get(form, ())]

    def _own_state(
        self, shared: Sequence[int], inputs: list[torch.Tensor], tensors: PassTensors, backend: Backend
    ) -> None:
        places = {index: self.sources[index] for index in map(self.donated.__getitem__, shared)}
        own = {index: place for index, place in places.items() if isinstance(place, Place)}
        give_own_buffers([place.get(tensors) for place in own.values()], backend)
        for index, place in own.items():
            inputs[index] = self._value(place, tensors, backend)
        assert self._held is not None
        values = self._held.present()
        for index, position in self._read:
            inputs[index] = values[position]


_ByPosition: TypeAlias = Sequence[torch.Tensor] | Mapping[int, torch.Tensor]


def _have_none(leaves: Iterable[torch.Tensor]) -> bool:
    return all(map(is_, map(_grad, leaves), repeat(None)))


def _form(tensor: torch.Tensor) -> Hashable:
    return tensor.dtype, tensor.shape


def _is_fixed(source: Place | str | Number) -> TypeGuard[Place]:
    return isinstance(source, Place) and source.kind == "tensor"


def _numbers(updates: Sequence[Update]) -> list[float]:
    return [number for update in updates for number in update.numbers]


def _key(source: Any) -> Any:
    if isinstance(source, Place):
        return source.key
    return ("number", str(source.value.dtype), source.of_update) if isinstance(source, Number) else source


def _keys(targets: list[list[Place]]) -> list[list[Any]]:
    return [sorted(map(repr, (place.key for place in places))) for places in targets]


def _ids(tensors: Sequence[torch.Tensor]) -> list[int]:
    return list(map(id, tensors))
