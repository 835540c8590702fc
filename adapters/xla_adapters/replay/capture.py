"""`RecordingScope`: a traced pass that is recorded as a call of its executable."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten
from torch.utils.weak import WeakTensorKeyDictionary

from xla_adapters.backend import Backend
from xla_adapters.host_random import HostRandom
from xla_adapters.replay.bound import BoundState, HostChange
from xla_adapters.replay.cached import CachedScope
from xla_adapters.replay.code_facts import CodeFacts
from xla_adapters.replay.errors import CannotReplay
from xla_adapters.replay.facts import ModuleFacts, facts_of
from xla_adapters.replay.foresight import Update
from xla_adapters.replay.number import Number
from xla_adapters.replay.packed import run_packed
from xla_adapters.replay.pending import PendingGraph, written_places
from xla_adapters.replay.places import Kept, Place
from xla_adapters.replay.recording import Recording
from xla_adapters.replay.request import Request
from xla_adapters.replay.tensor_facts import TensorFacts, hooks_of
from xla_adapters.replay.update import UpdateRecipe
from xla_adapters.replay.values import is_simple
from xla_adapters.rollback import StepJournal
from xla_adapters.waiting_steps import storage_of

# Inputs that are Python numbers: no user's tensors, if they share a buffer with one.
_numbers = WeakTensorKeyDictionary()


class RecordingScope(CachedScope):
    """A `CachedScope` that is recorded as a call of its executable.

    A pass that cannot be recorded is executed by a sync, which is the cheaper one to trace for, unless
    the executable is there already.

    Args:
        request: what is known of the pass.
        known: the names of the step's executables; added to.
        done: is given the recording, or why there is none, and whether the pass ran one of them.
        **options: as for `StepScope`.
    """

    def __init__(
        self,
        request: Request,
        known: set[bytes],
        done: Callable[[Recording | CannotReplay, bool], None],
        **options: Any,
    ) -> None:
        super().__init__(request, **options)
        self._executables = known
        self._done = done
        self._called: dict[int, torch.nn.Module] = {id(module): module for module in request.modules}
        self._recipes: list[UpdateRecipe] = []
        self._updates: list[Update] = []
        self._obstacle: CannotReplay | None = None
        self._entry: dict[int, list[Place]] = {}
        self._host_random: HostRandom | None = None
        self._before_update: set[int] = set()
        self._update_buffers: set[int] = set()

    def _start_tracing(self) -> None:
        self._watched = self._request.watched()
        self._restores.callback(register_module_forward_pre_hook(self._note_module).remove)
        self._host_random = HostRandom.now()
        super()._start_tracing()
        # What an execution under way computes (a batch changed on the device) has another handle once it has ended.
        self._backend.wait()
        tensors = self._request.tensors
        for kind, group in (("batch", tensors.batch), ("extra", tensors.extras)):
            for index, handle in enumerate(self._backend.handles(group)):
                self._entry.setdefault(handle, []).append(Place(kind, name=index))
        # Made here, so that the graph's input is known by its buffer.
        self._seed_input = self._backend.seed_input()

    def _note_module(self, module: torch.nn.Module, args: Any) -> None:
        if self.is_current:
            self._called.setdefault(id(module), module)

    def update_begins(self, optimizer: Optimizer) -> None:
        """Computes what the optimizer will do on the host."""
        self.pause_watch()
        random = HostRandom.now()
        try:
            if any(recipe.optimizer is optimizer for recipe in self._recipes):
                raise CannotReplay(f"{type(optimizer).__name__} steps twice in one step")
            recipe = UpdateRecipe(optimizer)
            self._updates.append(recipe.play())
            recipe.find_idle_groups()
            if not random.equals(HostRandom.now()):
                raise CannotReplay(f"{type(optimizer).__name__} draws random numbers on the host")
            self._recipes.append(recipe)
        except CannotReplay as error:
            self._obstacle = error
            # The step itself draws what was drawn for its numbers alone.
            random.restore()
        finally:
            with torch._C.DisableTorchFunction():
                self._before_update = self._buffers_read()
            super().update_begins(optimizer)
            self.resume_watch()

    def update_ended(self, optimizer: Optimizer) -> None:
        """Notes what the optimizer alone reads."""
        with torch._C.DisableTorchFunction():
            self._update_buffers |= self._buffers_read() - self._before_update
        super().update_ended(optimizer)

    def _buffers_read(self) -> set[int]:
        """The buffers that the graphs of the state and of its gradients read, as far as they are traced."""
        written = [entry.tensor for entry in self._journal.entries()]
        gradients = [leaf.grad for leaf, _ in self._journal.leaves() if leaf.grad is not None]
        pending = [
            tensor
            for tensor in (*written, *gradients)
            if torch._is_functional_tensor(tensor) and self._backend.is_pending(tensor)
        ]
        return {item.handle for item in self._backend.graph_inputs(pending)}

    # ---- the end -------------------------------------------------------------------------------------

    def _execute(self) -> None:
        with torch.no_grad(), torch._C.DisableTorchFunction():
            try:
                graph = self._pending(iter(()))
            except CannotReplay as error:
                self._backend.finish_step()
                self._done(error, False)
                return
            found: Recording | CannotReplay
            try:
                self._check()
                found = self._record(
                    _Capture(self._backend, self._journal, self._entry, self._request, self._bound, graph)
                )
            except CannotReplay as error:
                found = error
            # One that is packed is for replays alone: others would have to bring the rows back each time.
            if isinstance(found, Recording) and not self._request.several and self._is_run_packed(found, graph):
                self._done(found, False)
                return
            is_cached = isinstance(found, Recording) or graph.name in self._executables
            if isinstance(found, Recording) and self._request.several:
                found.graph = self._backend.graph_text(graph.outputs)
            if is_cached:
                # What was drawn while tracing moved the stream on, and the end of a step goes on from its beginning.
                self._backend.set_seed(self._stream)
                name, results = graph.run()
                self._executables.add(name)
                if isinstance(found, Recording):
                    found.executable = name
                    found.take_outputs(results)
            else:
                self._backend.finish_step()
        self._done(found, is_cached)

    def _is_run_packed(self, recording: Recording, graph: PendingGraph) -> bool:
        # As below.
        self._backend.set_seed(self._stream)
        return run_packed(recording, graph, self._backend)

    def _check(self) -> None:
        if self._obstacle is not None:
            raise self._obstacle
        if self._break_met:
            raise CannotReplay("a value was read in the step")
        if self._host_random is None or not self._host_random.equals(HostRandom.now()):
            raise CannotReplay("the step draws random numbers on the host")
        for name, value in self._request.watched().items():
            if value != self._watched.get(name):
                raise CannotReplay(f"the step changes {name}: {self._watched.get(name)} -> {value}")

    def _record(self, capture: _Capture) -> Recording:
        modules = list(self._called.values())
        facts = facts_of(modules, capture.rebound_names, self._request.unrelated)
        if self._request.strict:
            for fact in facts:
                hook = fact.user_hook()
                if hook is not None:
                    raise CannotReplay(hook)
        for recipe in self._recipes:
            recipe.accept()
            capture.rebound_state(recipe)
            capture.note(Place("tensor", owner=tensor) for tensor in recipe.state_tensors())
        capture.note(Place("tensor", owner=tensor) for tensor in self._request.constants)
        for fact in facts:
            capture.note(Place("tensor", owner=item) for item in fact.tensors_held())
        loose = [TensorFacts.of(tensor) for tensor in self._loose(facts)]
        if self._request.strict and any(hooks_of(traits.tensor) for traits in loose):
            raise CannotReplay("a parameter that is in no module has a hook, whose Python a replay would leave out")
        kept = {name: capture.kept(value) for name, value in self._kept.items()}
        (seed,) = self._backend.handles([self._seed_input])
        return Recording(
            sources=capture.sources(seed, self._update_buffers),
            targets=capture.targets(kept, self._kept),
            fresh_grads=capture.fresh_grads,
            dropped_grads=capture.dropped_grads,
            grads=capture.grads,
            donated=list(capture.graph.donors),
            kept=kept,
            recipes=self._recipes,
            updates=self._updates,
            facts=facts,
            loose=loose,
            code=CodeFacts(modules=[fact.module for fact in facts], deep=self._request.strict),
            host_changes=capture.host_changes,
            rebound=capture.rebound,
            unrepeatable=capture.unrepeatable,
        )

    def _loose(self, facts: list[ModuleFacts]) -> list[torch.Tensor]:
        """Parameters that are in no module."""
        seen = {id(parameter) for fact in facts for parameter in fact.parameters()}
        seen |= set(map(id, self._request.tensors.batch))
        groups = [group["params"] for recipe in self._recipes for group in recipe.optimizer.param_groups]
        loose: dict[int, torch.Tensor] = {}
        for tensor in (*(leaf for leaf, _ in self._journal.leaves()), *(item for group in groups for item in group)):
            if id(tensor) not in seen:
                loose[id(tensor)] = tensor
        return list(loose.values())


class _Capture:
    """Finds out where the pending graph's inputs come from and where its outputs go."""

    def __init__(
        self,
        backend: Backend,
        journal: StepJournal,
        entry: dict[int, list[Place]],
        request: Request,
        bound: BoundState,
        graph: PendingGraph,
    ) -> None:
        self._backend = backend
        self._request = request
        self._entry = {handle: list(places) for handle, places in entry.items()}
        self.graph = graph
        self.fresh_grads: set[int] = set()
        self.dropped_grads: list[torch.Tensor] = []
        self.grads: list[tuple[torch.Tensor, bool]] = []
        self._results: dict[int, list[Place]] = {}
        self._known: set[int] = set()
        self._noted: set[int] = set()
        self.rebound: set[tuple[str, int, str | int]] = set()
        self.host_changes: list[HostChange] = []
        self.unrepeatable = ""
        self._grads(journal)
        self._rebound(journal)
        self._written(journal, bound)
        self._bind(bound)

    # ---- the state -----------------------------------------------------------------------------------

    def _grads(self, journal: StepJournal) -> None:
        for leaf, before in journal.leaves():
            self.grads.append((leaf, before is not None))
            if before is not None:
                # Also if it is dropped: the journal holds it until the step is executed.
                self._noted.add(id(before))
                self._known.add(id(before))
            if leaf.grad is before:
                continue
            if leaf.grad is None:
                self.dropped_grads.append(leaf)
                continue
            self.fresh_grads.add(id(leaf))
            self._result(Place("grad", owner=leaf), leaf.grad)

    def _rebound(self, journal: StepJournal) -> None:
        self.rebound_names: set[tuple[int, str]] = set()
        for module, name, before in journal.rebound_buffers():
            now = module._buffers.get(name)
            if before is None or now is None:
                raise CannotReplay(f"the buffer {name} of {type(module).__name__} came or went")
            self.rebound_names.add((id(module), name))
            place = Place("buffer", owner=module, name=name)
            self._source(place, before)
            self._result(place, now)

    def _bind(self, bound: BoundState) -> None:
        for owner, name, before in bound.tensors():
            if before.device.type == "xla" and not self._backend.is_pending(before):
                self._source(Place("bound", owner, name), before)
        tensors, self.host_changes = bound.changes(self._request.bound())
        for owner, name in tensors:
            place = Place("bound", owner, name)
            self.rebound.add(place.key)
            self._result(place, vars(owner)[name])
        self.rebound_names |= {(id(owner), name) for owner, name in tensors}
        self.rebound_names |= {(id(change.owner), change.name) for change in self.host_changes}

    def _written(self, journal: StepJournal, bound: BoundState) -> None:
        self._ours = {id(value) for entry in journal.entries() for value in (entry.value, entry.twin)}
        batch = {storage_of(tensor) for tensor in self._request.tensors.batch}
        batch -= {storage_of(tensor) for tensor in self._request.tensors.extras}
        for place, entry in written_places(journal, self._request.tensors, bound):
            if self._backend.is_pending(entry.former):
                raise CannotReplay("a tensor was written through an alias (data or detach()), and its value is lost")
            self._source(place, entry.former)
            if self._backend.is_pending(entry.tensor):
                if storage_of(entry.tensor) in batch:
                    # The next pass has another batch, or none on the device that anybody sees.
                    raise CannotReplay("the step writes into a tensor of its batch")
                if place.holds(entry.tensor):
                    self._result(place, entry.tensor)
            elif not self._backend.holds(entry.tensor, entry.value):
                raise CannotReplay("a tensor of the state became a copy of another tensor")

    def rebound_state(self, recipe: UpdateRecipe) -> None:
        """Entries of an optimizer's state that its update sets to new tensors."""
        for state, name in recipe.rebound():
            self._result(Place("state", owner=state, name=name), state[name])

    def note(self, places: Iterable[Place]) -> None:
        """Places that the graph may read, and does not write."""
        for place in places:
            tensor = place.owner
            if tensor.device.type == "xla" and id(tensor) not in self._noted and not self._backend.is_pending(tensor):
                self._source(place, tensor)

    def _source(self, place: Place, before: torch.Tensor) -> None:
        self._noted.add(id(place.owner if place.kind == "tensor" else before))
        if before.device.type == "xla":
            places = self._entry.setdefault(self._backend.handles([before])[0], [])
            if all(other.key != place.key for other in places):
                places.append(place)

    def _result(self, place: Place, tensor: torch.Tensor) -> None:
        if self._backend.is_pending(tensor):
            torch._sync(tensor)  # type: ignore[attr-defined,no-untyped-call]
            self._known.add(id(tensor))
            self._noted.add(id(place.owner) if place.kind == "tensor" else id(tensor))
            self._results.setdefault(self._backend.tensor_number(tensor), []).append(place)
        elif place.kind == "bound":
            # A default, say. The next pass need not do so, and can have the same executable.
            self.unrepeatable = f"{type(place.owner).__name__}.{place.name} is set to a value that is not computed"
        elif place.kind in ("grad", "buffer", "state"):
            raise CannotReplay(f"a {place.kind} is set to a tensor that the step does not compute")

    # ---- the graph -----------------------------------------------------------------------------------

    def sources(self, seed: int, update_buffers: set[int]) -> list[Place | str | Number]:
        """Where the inputs come from.

        Args:
            seed: the buffer of the random seed.
            update_buffers: those that only the optimizers read.
        """
        number = self._backend.seed_number()
        if any(item.number == number and item.handle != seed for item in self.graph.inputs):
            raise CannotReplay("the step draws from several random streams")
        owned: set[int] | None = None
        found: list[Place | str | Number] = []
        for item in self.graph.inputs:
            places = self._entry.get(item.handle, [])
            if len(places) > 1:
                raise CannotReplay("two tensors of the state share a buffer")
            if places:
                found.append(places[0])
            elif item.handle == seed:
                found.append("seed")
            else:
                if owned is None:
                    owned = self._owned()
                if item.handle in owned or item.value.ndim:
                    what = f"{tuple(item.value.shape)} {item.value.dtype}".replace("torch.", "")
                    raise CannotReplay(
                        f"the step reads a tensor ({what}) that is neither its batch nor part of a module or optimizer"
                    )
                _numbers[item.value] = True
                found.append(Number(item.value, of_update=item.handle in update_buffers))
        return found

    def _owned(self) -> set[int]:
        """The buffers of tensors that Python code holds."""
        feed = set(map(id, self.graph.feed))
        return self._backend.buffers_of(
            [
                tensor
                for tensor in self.graph.live
                if tensor.ndim == 0
                and id(tensor) not in feed
                and tensor not in _numbers
                and not self._backend.is_pending(tensor)
            ]
        )

    def kept(self, value: Any) -> Kept:
        """Where the tensors of a value come from that the step hands out."""
        leaves, spec = tree_flatten(value)
        batch = {id(tensor): index for index, tensor in enumerate(self._request.tensors.batch)}
        found: list[int | Place | tuple[Any, ...]] = []
        for leaf in leaves:
            if not isinstance(leaf, torch.Tensor):
                if not is_simple(leaf):
                    raise CannotReplay(f"the step hands out a {type(leaf).__name__}")
                found.append((leaf,))
            elif id(leaf) in batch:
                found.append(Place("batch", name=batch[id(leaf)]))
            elif leaf.device.type == "xla" and self._backend.is_pending(leaf):
                found.append(self.graph.numbers.index(self._backend.tensor_number(leaf)))
            elif id(leaf) in self._noted:
                found.append(Place("tensor", owner=leaf))
            elif (place := self._place_in_batch(leaf)) is not None:
                found.append(place)
            else:
                raise CannotReplay("the step hands out a tensor that it does not compute")
        return Kept(spec, tuple(found))

    def _place_in_batch(self, tensor: torch.Tensor) -> Place | None:
        """Where a tensor of the batch lies that was detached."""
        if tensor.device.type != "xla":
            return None
        (handle,) = self._backend.handles([tensor])
        for place in self._entry.get(handle, ()):
            if place.kind == "batch" and place.get(self._request.tensors).shape == tensor.shape:
                return place
        return None

    def targets(self, kept: dict[str, Kept], values: dict[str, Any]) -> list[list[Place]]:
        """Where the outputs go."""
        handed_out = {id(leaf) for value in values.values() for leaf in tree_flatten(value)[0]}
        if self._request.strict:
            for tensor in self.graph.pending:
                if id(tensor) not in handed_out and id(tensor) not in self._known and id(tensor) not in self._ours:
                    shape = tuple(tensor.shape)
                    raise CannotReplay(f"the step leaves a tensor behind, of shape {shape}, that it does not hand out")
        return [self._results.get(number, []) for number in self.graph.numbers]
