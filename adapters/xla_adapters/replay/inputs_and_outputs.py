"""`GraphSlots`: finds where the inputs of a pending graph come from, and where its outputs go."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._pytree import tree_flatten
from torch.utils.weak import WeakTensorKeyDictionary

from xla_adapters.replay.attribute_changes import BoundState, HostChange
from xla_adapters.replay.call_spec import CallSpec
from xla_adapters.replay.number_inputs import Number
from xla_adapters.replay.optimizer_host_math import OptimizerHostMath
from xla_adapters.replay.pending_graph import PendingGraph, written_slots
from xla_adapters.replay.tensor_places import CannotReplay, Computed, Kept, Slot
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


class GraphSlots:
    """Finds the slots of a pending graph's inputs and outputs, from the undo log of the step that traced it.

    Args:
        runtime: the runtime.
        undo_log: the step's.
        entry: slots of those of the batch and the extras that are still where they were before the step, by the handle
            of their buffer.
        spec: describes the call.
        bound: the attributes that the step may set, as they were before it.
        graph: the pending graph.

    Attributes:
        created, dropped, grads: see `GradientChanges`.
        storages: by the key of a slot the storage of the tensor that was there before the step.
        rebound, host_changes: see `HostEffects`.
        rebound_names: `id` of the owner and name of each buffer and attribute that the step sets.
        unrepeatable: see `CachedCall`.

    Raises:
        CannotReplay: the step does something that a replay cannot do.
    """

    def __init__(
        self,
        runtime: Runtime,
        undo_log: UndoLog,
        entry: dict[int, list[Slot]],
        spec: CallSpec,
        bound: BoundState,
        graph: PendingGraph,
    ) -> None:
        self._runtime = runtime
        self._spec = spec
        self._entry = {handle: list(slots) for handle, slots in entry.items()}
        self.graph = graph
        self.created: set[int] = set()
        self.dropped: list[torch.Tensor] = []
        self.grads: list[tuple[torch.Tensor, bool]] = []
        self.storages: dict[tuple[str, int, str | int], int] = {}
        self._results: dict[int, list[Slot]] = {}
        self._known: set[int] = set()
        self._noted: set[int] = set()
        self.rebound: set[tuple[str, int, str | int]] = set()
        self.host_changes: list[HostChange] = []
        self.unrepeatable = ""
        extras = set(map(id, spec.tensors.extras))
        self._batch = {id(tensor) for tensor in spec.tensors.batch} - extras
        self._grads(undo_log)
        self._rebound(undo_log)
        self._written(undo_log, bound)
        self._bind(bound)

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
            self._result(Slot("grad", owner=leaf), leaf.grad)

    def _rebound(self, undo_log: UndoLog) -> None:
        self.rebound_names: set[tuple[int, str]] = set()
        for module, name, before in undo_log.rebound_buffers():
            now = module._buffers.get(name)
            if before is None or now is None:
                raise CannotReplay(f"the buffer {name} of {type(module).__name__} came or went")
            self.rebound_names.add((id(module), name))
            slot = Slot("buffer", owner=module, name=name)
            self.storages[slot.key] = storage_of(before)
            self._source(slot, before)
            self._result(slot, now)

    def _bind(self, bound: BoundState) -> None:
        for owner, name, before in bound.tensors():
            if before.device.type == "xla" and not self._runtime.tracing.is_pending(before):
                slot = Slot("bound", owner, name)
                self.storages[slot.key] = storage_of(before)
                self._source(slot, before)
        tensors, self.host_changes = bound.changes(self._spec.owners())
        for owner, name in tensors:
            slot = Slot("bound", owner, name)
            self.rebound.add(slot.key)
            self._result(slot, vars(owner)[name])
        self.rebound_names |= {(id(owner), name) for owner, name in tensors}
        self.rebound_names |= {(id(change.owner), change.name) for change in self.host_changes}

    def _written(self, undo_log: UndoLog, bound: BoundState) -> None:
        self._ours = {id(value) for entry in undo_log.entries() for value in (entry.value, entry.twin)}
        batch = {storage_of(tensor) for tensor in self._spec.tensors.batch}
        batch -= {storage_of(tensor) for tensor in self._spec.tensors.extras}
        for slot, entry in written_slots(undo_log, self._spec.tensors, bound):
            if self._is_of_batch(slot, entry, batch):
                continue
            if self._runtime.tracing.is_pending(entry.former):
                raise CannotReplay("a tensor was written through an alias (data or detach()), and its value is lost")
            self.storages[slot.key] = storage_of(entry.tensor)
            self._source(slot, entry.former)
            if self._runtime.tracing.is_pending(entry.tensor):
                if storage_of(entry.tensor) in batch:
                    # The next call has another batch, so the write would be lost.
                    raise CannotReplay("the step writes into a tensor of its batch")
                if slot.holds(entry.tensor):
                    self._result(slot, entry.tensor)
            elif not self._runtime.values.holds(entry.tensor, entry.value, entry.twin):
                raise CannotReplay("a tensor of the state became a copy of another tensor")

    def _is_of_batch(self, slot: Slot, entry: TensorEntry, batch: set[int]) -> bool:
        """Whether a recorded tensor is one of the batch that the step only reads.

        The undo log records all arguments of a call that writes one of them. If user code holds the tensor, or an alias
        of it, the analysis of its code and modules finds that, and it is noted as a constant or a part of the state:
        then the graph's input has two slots. So without the analysis it may be older than the call.
        """
        return (
            slot.kind == "tensor"
            and self._spec.strict
            and storage_of(entry.tensor) in batch
            and not self._runtime.tracing.is_pending(entry.tensor)
            and self._runtime.values.holds(entry.tensor, entry.value, entry.twin)
        )

    def rebound_state(self, math: OptimizerHostMath) -> None:
        """Adds the entries of an optimizer's state that its update sets to new tensors."""
        for state, name in math.rebound():
            self._result(Slot("state", owner=state, name=name), state[name])

    def note(self, slots: Iterable[Slot]) -> None:
        """Adds slots that the graph may read and does not write."""
        for slot in slots:
            tensor = slot.owner
            if (
                tensor.device.type == "xla"
                and id(tensor) not in self._noted
                and not self._runtime.tracing.is_pending(tensor)
            ):
                self._source(slot, tensor)

    def _source(self, slot: Slot, before: torch.Tensor) -> None:
        self._noted.add(id(slot.owner if slot.kind == "tensor" else before))
        if before.device.type == "xla":
            slots = self._entry.setdefault(self._runtime.lazy.handles([before])[0], [])
            if all(other.key != slot.key for other in slots):
                slots.append(slot)

    def _result(self, slot: Slot, tensor: torch.Tensor) -> None:
        if self._runtime.tracing.is_pending(tensor):
            torch._sync(tensor)  # type: ignore[attr-defined,no-untyped-call]
            self._known.add(id(tensor))
            self._noted.add(id(slot.owner) if slot.kind == "tensor" else id(tensor))
            self._results.setdefault(self._runtime.lazy.tensor_number(tensor), []).append(slot)
        elif slot.kind == "bound":
            # A default value, for example. The next call may not set it, and have the same executable.
            self.unrepeatable = f"{type(slot.owner).__name__}.{slot.name} is set to a value that is not computed"
        elif slot.kind in ("grad", "buffer", "state"):
            raise CannotReplay(f"a {slot.kind} is set to a tensor that the step does not compute")

    # ---- the graph -----------------------------------------------------------------------------------

    def sources(self, seed: int, update_buffers: set[int], numbers: set[int]) -> list[Slot | str | Number]:
        """Where the inputs come from.

        Args:
            seed: the handle of the random seed.
            update_buffers: the handles of inputs that only the optimizers read.
            numbers: the handles of those of them that are known to be Python numbers.

        Raises:
            CannotReplay: an input is a tensor whose slot is not known.
        """
        number = self._runtime.random.seed_number()
        if any(item.number == number and item.handle != seed for item in self.graph.inputs):
            raise CannotReplay("the step draws from several random streams")
        owned: set[int] | None = None
        found: list[Slot | str | Number] = []
        for item in self.graph.inputs:
            slots = self._entry.get(item.handle, [])
            kinds = {slot.kind for slot in slots}
            # A tensor that is twice in the batch is so in each call of this signature: either slot will do.
            if len(slots) > 1 and kinds != {"batch"}:
                whose = "of the batch and one of the state" if "batch" in kinds else "of the state"
                raise CannotReplay(f"two tensors {whose} share a buffer")
            if slots:
                found.append(slots[0])
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

    def kept(self, value: Any) -> Kept:
        """Where the leaves of a value come from that the step returns.

        Raises:
            CannotReplay: a leaf is neither computed by the step, nor part of its state or batch, nor a plain value.
        """
        leaves, spec = tree_flatten(value)
        batch = {id(tensor): index for index, tensor in enumerate(self._spec.tensors.batch)}
        found: list[int | Slot | Computed | tuple[Any, ...]] = []
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
                found.append(Slot("batch", name=batch[id(leaf)]))
            elif leaf.device.type == "xla" and self._runtime.tracing.is_pending(leaf):
                found.append(self.graph.numbers.index(self._runtime.lazy.tensor_number(leaf)))
            elif id(leaf) in self._noted:
                found.append(Slot("tensor", owner=leaf))
            elif (slot := self._slot_in_batch(leaf)) is not None:
                found.append(slot)
            else:
                raise CannotReplay("the step returns a tensor that it does not compute")
        return Kept(spec, tuple(found))

    def _slot_in_batch(self, tensor: torch.Tensor) -> Slot | None:
        """The slot of a tensor that was detached from one of the batch; None if there is none."""
        if tensor.device.type != "xla":
            return None
        (handle,) = self._runtime.lazy.handles([tensor])
        for slot in self._entry.get(handle, ()):
            if slot.kind == "batch" and slot.get(self._spec.tensors).shape == tensor.shape:
                return slot
        return None

    def targets(self, values: dict[str, Any]) -> list[list[Slot]]:
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

    def elsewhere(self, sources: list[Slot | str | Number], targets: list[list[Slot]]) -> list[Slot]:
        """See `GraphValues`."""
        read = [source for source in sources if isinstance(source, Slot) and source.kind not in ("tensor", "batch")]
        written = [slot for slots in targets for slot in slots if slot.kind in ("grad", "extra")]
        written = [slot for slot in written if slot.key in self.storages]
        return list({slot.key: slot for slot in (*read, *written)}.values())

    def storage_at(self, slot: Slot) -> int:
        """The storage of the tensor that was at a slot before the step."""
        known = self.storages.get(slot.key)
        return storage_of(slot.get(self._spec.tensors)) if known is None else known


def storage_of(tensor: torch.Tensor) -> int:
    """Names what a tensor shares with its views and aliases."""
    return int(tensor.untyped_storage()._cdata)
