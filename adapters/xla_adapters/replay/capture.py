"""`RecordingScope`: a traced pass that is executed as a cached graph, and recorded as a call of it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten
from torch.utils.weak import WeakTensorKeyDictionary

from xla_adapters.backend import Backend
from xla_adapters.replay.bound import BoundState, HostChange, Owner
from xla_adapters.replay.errors import CannotReplay
from xla_adapters.replay.facts import all_related, facts_of, is_simple
from xla_adapters.replay.host_random import host_random, same_random
from xla_adapters.replay.places import PassTensors, Place
from xla_adapters.replay.recording import Kept, Number, Recording
from xla_adapters.replay.update import Update, UpdateRecipe
from xla_adapters.step_scope import StepScope

# Inputs that are Python numbers: no user's tensors, if they share a buffer with one.
_numbers = WeakTensorKeyDictionary()


@dataclass(kw_only=True)
class Request:
    """What is known of a pass before it begins.

    Attributes:
        tensors: the batch, and what else changes from pass to pass.
        modules: beside those that are called in the pass.
        set_modes: what the step does first to put its modules into their modes.
        patience: passes that may be traced while the proof waits for somebody else's transfer to the host.
        strict: whether the step's Python must be free of effects that a replay would leave out.
        bound: the objects whose attributes the step may bind anew, as they are when it is called.
        watched: what the step's Python must leave as it is, by name: compared before and behind the step.
        unrelated: of a module, the attributes that no graph depends on, or that are noted elsewhere.
        constants: tensors that the step may read and nobody writes.
    """

    tensors: PassTensors = field(default_factory=PassTensors)
    modules: Sequence[torch.nn.Module] = ()
    set_modes: Callable[[], object] | None = None
    patience: int = 0
    strict: bool = True
    bound: Callable[[], Sequence[Owner]] = tuple
    watched: Callable[[], Mapping[str, object]] = dict
    unrelated: Callable[[torch.nn.Module], Collection[str]] = all_related
    constants: Sequence[torch.Tensor] = ()


class RecordingScope(StepScope):
    """A `StepScope` whose graph is compiled so that it can be run again, and is run so at once.

    So the traced passes and the replayed ones share one executable.

    Args:
        request: what is known of the pass.
        done: is given the recording, or why there is none.
        **options: as for `StepScope`.
    """

    def __init__(self, request: Request, done: Callable[[Recording | CannotReplay], None], **options: Any) -> None:
        super().__init__(**options)
        self._request = request
        self._done = done
        self._kept: dict[str, Any] = {}
        self._called: dict[int, torch.nn.Module] = {id(module): module for module in request.modules}
        self._recipes: list[UpdateRecipe] = []
        self._updates: list[Update] = []
        self._obstacle: CannotReplay | None = None
        self._entry: dict[int, list[Place]] = {}
        self._host_random: Any = None
        self._seed_input: torch.Tensor | None = None
        self._before_update: set[int] = set()
        self._update_buffers: set[int] = set()

    def keep(self, name: str, value: Any) -> None:
        """Notes a value that the step hands out under a name."""
        self._kept[name] = value

    def _start_tracing(self) -> None:
        self._backend.initialize()
        # Also where nothing is pending: tensors that share a buffer become known as such.
        self._backend.flush()
        tensors = self._request.tensors
        for kind, group in (("batch", tensors.batch), ("extra", tensors.extras)):
            for index, handle in enumerate(self._backend.handles(group)):
                self._entry.setdefault(handle, []).append(Place(kind, name=index))
        self._bound = BoundState(self._request.bound())
        self._watched = self._request.watched()
        self._restores.callback(register_module_forward_pre_hook(self._note_module).remove)
        self._host_random = host_random()
        super()._start_tracing()
        # Made here, so that the graph's input is known by its buffer.
        self._seed_input = self._backend.seed_input()

    def _note_module(self, module: torch.nn.Module, args: Any) -> None:
        if self.is_current:
            self._called.setdefault(id(module), module)

    def flush(self) -> None:
        """As in `StepScope`; a pass that executes in its middle is no single call."""
        self._obstacle = CannotReplay("a part of the step was executed before its end")
        super().flush()

    def update_begins(self, optimizer: Optimizer) -> None:
        """Computes what the optimizer will do on the host."""
        if any(recipe.optimizer is optimizer for recipe in self._recipes):
            self._obstacle = CannotReplay(f"{type(optimizer).__name__} steps twice in one step")
            return
        self.pause_watch()
        try:
            recipe = UpdateRecipe(optimizer)
            self._updates.append(recipe.play())
            self._recipes.append(recipe)
        except CannotReplay as error:
            self._obstacle = error
        finally:
            with torch._C.DisableTorchFunction():
                self._before_update = self._buffers_read()
                self._backend.separate_scalars()
            self.resume_watch()

    def update_ended(self, optimizer: Optimizer) -> None:
        """What follows shares no number with the update, as what went before."""
        with torch._C.DisableTorchFunction():
            self._update_buffers |= self._buffers_read() - self._before_update
            self._backend.separate_scalars()

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
                capture = _Capture(self._backend, self._journal, self._entry, self._request, self._bound)
                self._check()
                recording = self._record(capture)
            except CannotReplay as error:
                self._backend.finish_step()
                self._done(error)
                return
            results = self._backend.run_graph(recording.executable, capture.feed)
            self._backend.fill(capture.outputs, results)
            recording.outputs = results
            self._backend.finish_replayed()
        self._done(recording)

    def _check(self) -> None:
        if self._obstacle is not None:
            raise self._obstacle
        if self._break_met:
            raise CannotReplay("a value was read in the step")
        if not same_random(self._host_random, host_random()):
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
            capture.note(Place("tensor", owner=tensor) for tensor in recipe.state_tensors())
        capture.note(Place("tensor", owner=tensor) for tensor in self._request.constants)
        for fact in facts:
            capture.note(Place("tensor", owner=item) for item in fact.tensors_held())
        kept = {name: capture.kept(value) for name, value in self._kept.items()}
        assert self._seed_input is not None
        (seed,) = self._backend.handles([self._seed_input])
        sources, donated = capture.sources(seed, self._update_buffers)
        targets = capture.targets(kept, self._kept)
        executable = self._backend.compile_graph(capture.outputs, [capture.given_up[index] for index in donated])
        return Recording(
            executable=executable,
            sources=sources,
            targets=targets,
            fresh_grads=capture.fresh_grads,
            dropped_grads=capture.dropped_grads,
            grads=capture.grads,
            donated=donated,
            kept=kept,
            recipes=self._recipes,
            updates=self._updates,
            facts=facts,
            host_changes=capture.host_changes,
            rebound=capture.rebound,
            unrepeatable=capture.unrepeatable,
            outputs=[],
        )


class _Capture:
    """Finds out where the pending graph's inputs come from and where its outputs go."""

    def __init__(
        self, backend: Backend, journal: Any, entry: dict[int, list[Place]], request: Request, bound: BoundState
    ) -> None:
        self._backend = backend
        self._request = request
        self._entry = {handle: list(places) for handle, places in entry.items()}
        self.given_up: dict[int, torch.Tensor] = {}
        self.fresh_grads: set[int] = set()
        self.dropped_grads: list[torch.Tensor] = []
        self.grads: list[tuple[torch.Tensor, bool]] = []
        self._results: dict[int, list[Place]] = {}
        self._known: set[int] = set()
        self._noted: set[int] = set()
        self._donors: dict[int, torch.Tensor] = {}
        self.rebound: set[tuple[str, int, str | int]] = set()
        self.host_changes: list[HostChange] = []
        self.unrepeatable = ""
        self._grads(journal)
        self._rebound(journal)
        self._written(journal, {id(tensor): Place("bound", owner, name) for owner, name, tensor in bound.tensors()})
        self._bind(bound)
        self._find_outputs()

    # ---- the state -----------------------------------------------------------------------------------

    def _grads(self, journal: Any) -> None:
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
            if self._backend.is_pending(leaf.grad):
                # Gradients of biases are views of tensors that nobody sees; a clone adds nothing to the graph.
                leaf.grad = leaf.grad.clone()
            self.fresh_grads.add(id(leaf))
            self._result(Place("grad", owner=leaf), leaf.grad)

    def _rebound(self, journal: Any) -> None:
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

    def _written(self, journal: Any, bound: dict[int, Place]) -> None:
        grads = {id(before): leaf for leaf, before in journal.leaves() if before is not None}
        extras = {id(tensor): index for index, tensor in enumerate(self._request.tensors.extras)}
        rebound = {id(before) for _, _, before in journal.rebound_buffers()}
        self._ours: set[int] = set()
        for entry in journal.entries():
            tensor = entry.tensor
            self._ours |= {id(entry.value), id(entry.twin)}
            before = entry.value if entry.twin is None else entry.twin
            if id(tensor) in extras:
                place = Place("extra", name=extras[id(tensor)])
            elif id(tensor) in grads:
                place = Place("grad", owner=grads[id(tensor)])
            elif id(tensor) in bound:
                place = bound[id(tensor)]
            elif id(tensor) in rebound:
                continue
            else:
                place = Place("tensor", owner=tensor)
            self._source(place, before)
            if self._backend.is_pending(tensor):
                if place.holds(tensor):
                    self._result(place, tensor)
                    self._donors[self._backend.handles([before])[0]] = before
            elif not self._backend.holds(tensor, entry.value):
                raise CannotReplay("a tensor of the state became a copy of another tensor")

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
        elif place.kind in ("grad", "buffer"):
            raise CannotReplay(f"a {place.kind} is set to a tensor that the step does not compute")

    # ---- the graph -----------------------------------------------------------------------------------

    def _find_outputs(self) -> None:
        backend = self._backend
        # Once: it looks at every object there is.
        self._live = backend.live_tensors()
        self._pending = [
            tensor for tensor in self._live if torch._is_functional_tensor(tensor) and backend.is_pending(tensor)
        ]
        outputs: dict[int, torch.Tensor] = {}
        for tensor in self._pending:
            torch._sync(tensor)  # type: ignore[attr-defined,no-untyped-call]
            outputs[backend.tensor_number(tensor)] = backend.inner(tensor)
        if not outputs:
            raise CannotReplay("the step computes nothing")
        hidden = backend.pending_count() - len(outputs)
        if hidden:
            raise CannotReplay(f"{hidden} intermediate values are kept alive behind the step (by an autograd graph?)")
        self._numbers = sorted(outputs)
        self.outputs = [outputs[number] for number in self._numbers]
        self._inputs = backend.graph_inputs(self.outputs)
        self.feed = [item.value for item in self._inputs]

    def sources(self, seed: int, update_buffers: set[int]) -> tuple[list[Place | str | Number], list[int]]:
        """Where the inputs come from, and which of them the executable may reuse.

        Args:
            seed: the buffer of the random seed.
            update_buffers: those that only the optimizers read.
        """
        number = self._backend.seed_number()
        if any(item.number == number and item.handle != seed for item in self._inputs):
            raise CannotReplay("the step draws from several random streams")
        owned: set[int] | None = None
        found: list[Place | str | Number] = []
        donated: list[int] = []
        for index, item in enumerate(self._inputs):
            places = self._entry.get(item.handle, [])
            if len(places) > 1:
                raise CannotReplay("two tensors of the state share a buffer")
            if places:
                found.append(places[0])
                donor = self._donors.get(item.handle)
                if donor is not None and item.number == self._backend.tensor_number(donor):
                    donated.append(index)
                    self.given_up[index] = donor
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
        return found, donated

    def _owned(self) -> set[int]:
        """The buffers of tensors that Python code holds."""
        feed = set(map(id, self.feed))
        return self._backend.buffers_of(
            [
                tensor
                for tensor in self._live
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
                found.append(self._numbers.index(self._backend.tensor_number(leaf)))
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
            for tensor in self._pending:
                if id(tensor) not in handed_out and id(tensor) not in self._known and id(tensor) not in self._ours:
                    shape = tuple(tensor.shape)
                    raise CannotReplay(f"the step leaves a tensor behind, of shape {shape}, that it does not hand out")
        return [self._results.get(number, []) for number in self._numbers]
