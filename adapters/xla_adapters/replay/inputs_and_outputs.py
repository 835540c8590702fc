"""`InputsAndOutputs`: finds where the inputs of a pending graph come from, and where its outputs go."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._pytree import tree_flatten
from torch.utils.weak import WeakTensorKeyDictionary

from xla_adapters.replay.attribute_changes import AttributeChange, AttributesBefore
from xla_adapters.replay.call_spec import CallSpec
from xla_adapters.replay.number_inputs import Number
from xla_adapters.replay.optimizer_host_math import OptimizerHostMath
from xla_adapters.replay.pending_graph import PendingGraph, written_places
from xla_adapters.replay.tensor_places import CannotReplay, Computed, Returned, TensorPlace
from xla_adapters.runtime import Runtime
from xla_adapters.tracing.deferred_numbers import DeferredNumber, expression_of
from xla_adapters.tracing.undo_log import TensorEntry, UndoLog
from xla_adapters.utils.nested_values import is_simple

# Inputs that are Python numbers, so that they are not taken for tensors of the user that share their buffer.
_numbers = WeakTensorKeyDictionary()


def _counts(objects: list[Any]) -> list[int]:
    return [sys.getrefcount(item) for item in objects]


# Of an object that only a list references.
(_UNREFERENCED,) = _counts([object()])


def _referenced(tensors: list[torch.Tensor]) -> list[bool]:
    """For each tensor, whether anything else than this list references it.

    The search for live tensors also finds those that C++ has let go of meanwhile.
    """
    counts = _counts(tensors)
    return [
        count > _UNREFERENCED or tensor._use_count() > 1  # type: ignore[attr-defined]
        for tensor, count in zip(tensors, counts, strict=True)
    ]


class InputsAndOutputs:
    """Finds the places of a pending graph's inputs and outputs, from the undo log of the step that traced it.

    Args:
        runtime: the runtime.
        undo_log: the step's.
        entry: places of those of the batch and the extras that are still where they were before the step, by the handle
            of their buffer.
        spec: describes the call.
        attributes_before: the attributes that the step may set, as they were before it.
        graph: the pending graph.

    Attributes:
        created, dropped, grads: see `GradientChanges`.
        storages: by the key of a place the storage of the tensor that was there before the step.
        reassigned, host_changes: see `HostEffects`.
        reassigned_names: `id` of the owner and name of each buffer and attribute that the step sets.
        unrepeatable: see `TracedCall`.

    Raises:
        CannotReplay: the step does something that a replay cannot do.
    """

    def __init__(
        self,
        runtime: Runtime,
        undo_log: UndoLog,
        entry: dict[int, list[TensorPlace]],
        spec: CallSpec,
        attributes_before: AttributesBefore,
        graph: PendingGraph,
    ) -> None:
        self._runtime = runtime
        self._spec = spec
        self._entry = {handle: list(places) for handle, places in entry.items()}
        self.graph = graph
        self.created: set[int] = set()
        self.dropped: list[torch.Tensor] = []
        self.grads: list[tuple[torch.Tensor, bool]] = []
        self.storages: dict[tuple[str, int, str | int], int] = {}
        self._results: dict[int, list[TensorPlace]] = {}
        self._known: set[int] = set()
        self._noted: set[int] = set()
        self.reassigned: set[tuple[str, int, str | int]] = set()
        self.host_changes: list[AttributeChange] = []
        self.unrepeatable = ""
        extras = set(map(id, spec.tensors.extras))
        self._batch = {id(tensor) for tensor in spec.tensors.batch} - extras
        self._grads(undo_log)
        self._reassigned(undo_log)
        self._written(undo_log, attributes_before)
        self._note_attributes(attributes_before)

    # ---- the state -----------------------------------------------------------------------------------

    def _grads(self, undo_log: UndoLog) -> None:
        before_step = [storage_of(before) for _, before in undo_log.leaves() if before is not None]
        if len(set(before_step)) < len(before_step):
            raise CannotReplay("the gradients of two parameters share their memory")
        for leaf, before in undo_log.leaves():
            if id(leaf) in self._batch:
                if leaf.grad is not None:
                    # A replay would leave the gradient of the tensor that it is given as it is.
                    raise CannotReplay("a tensor of its batch gets a gradient in the step")
                continue
            self.grads.append((leaf, before is not None))
            if before is not None:
                # Even if it is dropped: the undo log refers to it until the step is executed.
                self._noted.add(id(before))
                self._known.add(id(before))
            if leaf.grad is before:
                continue
            if leaf.grad is None:
                self.dropped.append(leaf)
                continue
            self.created.add(id(leaf))
            self._result(TensorPlace("grad", owner=leaf), leaf.grad)

    def _reassigned(self, undo_log: UndoLog) -> None:
        self.reassigned_names: set[tuple[int, str]] = set()
        for module, name, before in undo_log.reassigned_buffers():
            now = module._buffers.get(name)
            if before is None or now is None:
                raise CannotReplay(f"the buffer {name} of {type(module).__name__} came or went")
            self.reassigned_names.add((id(module), name))
            place = TensorPlace("buffer", owner=module, name=name)
            self.storages[place.key] = storage_of(before)
            self._source(place, before)
            self._result(place, now)

    def _note_attributes(self, attributes_before: AttributesBefore) -> None:
        for owner, name, before in attributes_before.tensors():
            if before.device.type == "xla" and not self._runtime.tracing.is_pending(before):
                place = TensorPlace("attribute", owner, name)
                self.storages[place.key] = storage_of(before)
                self._source(place, before)
        tensors, self.host_changes = attributes_before.changes(self._spec.owners())
        for owner, name in tensors:
            place = TensorPlace("attribute", owner, name)
            self.reassigned.add(place.key)
            self._result(place, vars(owner)[name])
        self.reassigned_names |= {(id(owner), name) for owner, name in tensors}
        self.reassigned_names |= {(id(change.owner), change.name) for change in self.host_changes}

    def _written(self, undo_log: UndoLog, attributes_before: AttributesBefore) -> None:
        self._ours = {id(value) for entry in undo_log.entries() for value in (entry.value, entry.second_copy)}
        batch = {storage_of(tensor) for tensor in self._spec.tensors.batch}
        batch -= {storage_of(tensor) for tensor in self._spec.tensors.extras}
        for place, entry in written_places(undo_log, self._spec.tensors, attributes_before):
            if self._is_of_batch(place, entry, batch):
                continue
            if self._runtime.tracing.is_pending(entry.before_step):
                raise CannotReplay("a tensor was written through an alias (data or detach()), and its value is lost")
            self.storages[place.key] = storage_of(entry.tensor)
            self._source(place, entry.before_step)
            if self._runtime.tracing.is_pending(entry.tensor):
                if storage_of(entry.tensor) in batch:
                    # The next call has another batch, so the write would be lost.
                    raise CannotReplay("the step writes into a tensor of its batch")
                if place.holds(entry.tensor):
                    self._result(place, entry.tensor)
            elif not self._runtime.values.holds(entry.tensor, entry.value, entry.second_copy):
                raise CannotReplay("a tensor of the state became a copy of another tensor")

    def _is_of_batch(self, place: TensorPlace, entry: TensorEntry, batch: set[int]) -> bool:
        """Whether a recorded tensor is one of the batch that the step only reads.

        The undo log records all arguments of a call that writes one of them. If user code holds the tensor, or an alias
        of it, the analysis of its code and modules finds that, and it is noted as a constant or a part of the state:
        then the graph's input has two places. So without the analysis it may be older than the call.
        """
        return (
            place.kind == "tensor"
            and self._spec.strict
            and storage_of(entry.tensor) in batch
            and not self._runtime.tracing.is_pending(entry.tensor)
            and self._runtime.values.holds(entry.tensor, entry.value, entry.second_copy)
        )

    def reassigned_state(self, math: OptimizerHostMath) -> None:
        """Adds the entries of an optimizer's state that its update sets to new tensors."""
        for state, name in math.reassigned():
            self._result(TensorPlace("state", owner=state, name=name), state[name])

    def note(self, places: Iterable[TensorPlace]) -> None:
        """Adds places that the graph may read and does not write."""
        for place in places:
            tensor = place.owner
            if (
                tensor.device.type == "xla"
                and id(tensor) not in self._noted
                and not self._runtime.tracing.is_pending(tensor)
            ):
                self._source(place, tensor)

    def _source(self, place: TensorPlace, before: torch.Tensor) -> None:
        self._noted.add(id(place.owner if place.kind == "tensor" else before))
        if before.device.type == "xla":
            places = self._entry.setdefault(self._runtime.lazy.handles([before])[0], [])
            if all(other.key != place.key for other in places):
                places.append(place)

    def _result(self, place: TensorPlace, tensor: torch.Tensor) -> None:
        if self._runtime.tracing.is_pending(tensor):
            torch._sync(tensor)  # type: ignore[attr-defined,no-untyped-call]
            self._known.add(id(tensor))
            self._noted.add(id(place.owner) if place.kind == "tensor" else id(tensor))
            self._results.setdefault(self._runtime.lazy.tensor_number(tensor), []).append(place)
        elif place.kind == "attribute":
            # A default value, for example. The next call may not set it, and have the same executable.
            self.unrepeatable = f"{type(place.owner).__name__}.{place.name} is set to a value that is not computed"
        elif place.kind in ("grad", "buffer", "state"):
            raise CannotReplay(f"a {place.kind} is set to a tensor that the step does not compute")

    # ---- the graph -----------------------------------------------------------------------------------

    def sources(self, seed: int, update_buffers: set[int], numbers: set[int]) -> list[TensorPlace | str | Number]:
        """Where the inputs come from.

        Args:
            seed: the handle of the random seed.
            update_buffers: the handles of inputs that only the optimizers read.
            numbers: the handles of those of them that are known to be Python numbers.

        Raises:
            CannotReplay: an input is a tensor whose place is not known.
        """
        number = self._runtime.random.seed_number()
        if any(item.number == number and item.handle != seed for item in self.graph.inputs):
            raise CannotReplay("the step draws from several random streams")
        owned: set[int] | None = None
        found: list[TensorPlace | str | Number] = []
        for item in self.graph.inputs:
            places = self._entry.get(item.handle, [])
            kinds = {place.kind for place in places}
            # A tensor that is twice in the batch is so in each call of this signature: either place will do.
            if len(places) > 1 and kinds != {"batch"}:
                whose = "of the batch and one of the state" if "batch" in kinds else "of the state"
                raise CannotReplay(f"two tensors {whose} share a buffer")
            if places:
                found.append(places[0])
            elif item.handle == seed:
                found.append("seed")
            else:
                if owned is None and item.handle not in numbers:
                    owned = self._owned()
                if item.handle not in numbers and (item.handle in (owned or ()) or item.value.ndim):
                    if not item.value.ndim:
                        # Perhaps a Python number, which compiled code outside of the step shares. The next trace gets
                        # buffers of its own for its numbers.
                        self._runtime.lazy.separate_scalars()
                    what = f"{tuple(item.value.shape)} {item.value.dtype}".replace("torch.", "")
                    raise CannotReplay(
                        f"the step reads a tensor ({what}) that is neither its batch nor part of a module or optimizer"
                    )
                _numbers[item.value] = True
                found.append(Number(item.value, of_update=item.handle in update_buffers))
        return found

    def _owned(self) -> set[int]:
        """The buffers of scalar tensors that user code may refer to."""
        feed = set(map(id, self.graph.feed))
        referenced = _referenced(self.graph.live)
        return self._runtime.lazy.buffers_of(
            [
                tensor
                for tensor, is_referenced in zip(self.graph.live, referenced, strict=True)
                if tensor.ndim == 0
                and is_referenced
                and id(tensor) not in feed
                and tensor not in _numbers
                and not self._runtime.tracing.is_pending(tensor)
            ]
        )

    def returned(self, value: Any) -> Returned:
        """Where the leaves of a value come from that the step returns.

        Raises:
            CannotReplay: a leaf is neither computed by the step, nor part of its state or batch, nor a plain value.
        """
        leaves, spec = tree_flatten(value)
        batch = {id(tensor): index for index, tensor in enumerate(self._spec.tensors.batch)}
        found: list[int | TensorPlace | Computed | tuple[Any, ...]] = []
        for leaf in leaves:
            if isinstance(leaf, DeferredNumber):
                expression = expression_of(leaf)
                if expression is None:
                    raise CannotReplay("the step returns a number that an earlier step has computed")
                found.append(Computed(expression))
            elif not isinstance(leaf, torch.Tensor):
                if not is_simple(leaf):
                    raise CannotReplay(f"the step returns a {type(leaf).__name__}")
                found.append((leaf,))
            elif id(leaf) in batch:
                found.append(TensorPlace("batch", name=batch[id(leaf)]))
            elif leaf.device.type == "xla" and self._runtime.tracing.is_pending(leaf):
                found.append(self.graph.numbers.index(self._runtime.lazy.tensor_number(leaf)))
            elif id(leaf) in self._noted:
                found.append(TensorPlace("tensor", owner=leaf))
            elif (place := self._place_in_batch(leaf)) is not None:
                found.append(place)
            else:
                raise CannotReplay("the step returns a tensor that it does not compute")
        return Returned(spec, tuple(found))

    def _place_in_batch(self, tensor: torch.Tensor) -> TensorPlace | None:
        """The place of a tensor that was detached from one of the batch; None if there is none."""
        if tensor.device.type != "xla":
            return None
        (handle,) = self._runtime.lazy.handles([tensor])
        for place in self._entry.get(handle, ()):
            if place.kind == "batch" and place.get(self._spec.tensors).shape == tensor.shape:
                return place
        return None

    def targets(self, values: dict[str, Any]) -> list[list[TensorPlace]]:
        """Where the outputs go.

        Args:
            values: what the step returns, by name.

        Raises:
            CannotReplay: the step stores a tensor where it is not looked for.
        """
        returned = {id(leaf) for value in values.values() for leaf in tree_flatten(value)[0]}
        if self._spec.strict:
            for tensor in self.graph.pending:
                if id(tensor) not in returned and id(tensor) not in self._known and id(tensor) not in self._ours:
                    shape = tuple(tensor.shape)
                    raise CannotReplay(f"the step stores a tensor of shape {shape} that it does not return")
        return [self._results.get(number, []) for number in self.graph.numbers]

    def elsewhere(
        self, sources: list[TensorPlace | str | Number], targets: list[list[TensorPlace]]
    ) -> list[TensorPlace]:
        """See `GraphValues`."""
        read = [
            source for source in sources if isinstance(source, TensorPlace) and source.kind not in ("tensor", "batch")
        ]
        written = [place for places in targets for place in places if place.kind in ("grad", "extra")]
        written = [place for place in written if place.key in self.storages]
        return list({place.key: place for place in (*read, *written)}.values())

    def storage_at(self, place: TensorPlace) -> int:
        """The storage of the tensor that was at a place before the step."""
        known = self.storages.get(place.key)
        return storage_of(place.get(self._spec.tensors)) if known is None else known


def storage_of(tensor: torch.Tensor) -> int:
    """Names what a tensor shares with its views and aliases."""
    return int(tensor.untyped_storage()._cdata)
