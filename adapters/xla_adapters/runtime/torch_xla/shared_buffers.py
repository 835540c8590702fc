"""`XLASharedBuffers`: tensors that share a buffer, and a buffer of its own for each.

Copying a tensor into another outside of a graph copies nothing (torch_xla 2.9): `copy_`, `clone` and `to(copy=True)`
leave both with one buffer. An executable that reuses the buffer of one deletes the value of the other.

Two things tell that a tensor may share its buffer, and neither needs a look at other tensors. A buffer is labelled with
the number of the device tensor that used it last, which after a copy is the copy's. And the copy has been written to
since a step left it. Both are asked only after copies were made, which torch_xla counts.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import TypeAlias

import torch
import torch_xla
from torch_xla.core.xla_builder import create_placeholder_tensor

from xla_adapters.runtime.interface import Device, LazyTensors, Tracing, Values
from xla_adapters.runtime.interface.executables import ComputedTensors

_C = torch_xla._XLAC
# Operations after which two tensors may share a buffer.
_COPYING = ("xla::clone", "xla::copy", "xla::alias", "xla::alias_copy", "xla::index", "xla::index_put_")
# This one copies a tensor of the device, or uploads one of the host.
_MOVING = "xla::_copy_from"
# Has one sample for each upload by `_MOVING`, and for each index on the host, which `_COPYING` counts.
_UPLOADS = "IrValueTensorToXlaData"


# A tensor, and its storage, how often that was written to, and its device tensor.
_Noted: TypeAlias = tuple[weakref.ref[torch.Tensor], tuple[int, int, int]]


class XLASharedBuffers:
    """`SharedBuffers` on torch_xla.

    Args:
        device: of the tensors.
        tracing: tells which tensors are pending, and which there are.
        values: copies values, and puts them behind tensors.
        lazy: tells tensors and buffers apart.
    """

    def __init__(self, device: Device, tracing: Tracing, values: Values, lazy: LazyTensors) -> None:
        self._device = device
        self._tracing = tracing
        self._values = values
        self._lazy = lazy
        self._counted = (0, 0)
        self._copied = (0, 0)
        self._generation = 0
        self._separated = 0
        self._newest = 0
        self._looked_at_all = False
        # By `id`: a tensor that had a buffer of its own, and what tells whether it was written to since.
        self._own: dict[int, _Noted] = {}
        self._writers: weakref.WeakSet[ComputedTensors] = weakref.WeakSet()

    # ---- which tensors -----------------------------------------------------------------------------

    def copies_made(self) -> int:
        """See `SharedBuffers`."""
        if _counted() != self._counted:
            # The uploads first: one that another thread does meanwhile looks like a copy, and hides none.
            uploads = _uploads()
            self._counted = copying, moving = _counted()
            # Two numbers: in a single one the upload of an index would hide a copy.
            copied = copying, moving - uploads
            if copied != self._copied:
                self._copied = copied
                self._generation += 1
        return self._generation

    def note_own_buffers(self, tensors: Iterable[torch.Tensor]) -> None:
        """See `SharedBuffers`."""
        for tensor in tensors:
            noted = self._own.get(id(tensor))
            reference = noted[0] if noted is not None else weakref.ref(tensor, _Forget(self._own, id(tensor)))
            self._own[id(tensor)] = reference, self._mark(tensor)

    def note_writer(self, writer: ComputedTensors) -> None:
        """See `SharedBuffers`."""
        self._writers.add(writer)

    def may_share(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """See `SharedBuffers`."""
        for writer in list(self._writers):
            self.note_own_buffers(writer.computed())
        if self._tracing.eager() or self.are_read(tensors):
            # Labels the buffers that were copied since the last one.
            self._tracing.flush()
        found = []
        for tensor in tensors:
            value = self._values.snapshot(tensor)
            if self._tracing.is_pending(value):
                continue
            noted = self._own.get(id(tensor))
            if noted is None or noted[1] != self._mark(tensor) or self._label(value) != self._lazy.tensor_number(value):
                found.append(tensor)
        return self._held_by_others(found) if found else []

    def _held_by_others(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Those of these tensors whose buffers other live tensors have: a read may have labelled one, too."""
        # Before an execution has begun, its results have other handles than afterwards.
        self._device.wait()
        owners: dict[int, list[torch.Tensor]] = {}
        for tensor, handle in zip(tensors, self._lazy.handles(tensors), strict=True):
            owners.setdefault(handle, []).append(tensor)
        numbers = {handle: {self._lazy.tensor_number(tensor) for tensor in own} for handle, own in owners.items()}
        forms = {(tensor.dtype, tensor.shape) for tensor in tensors}
        shared = {handle for handle, own in numbers.items() if len(own) > 1}
        for tensor in self._tracing.live_tensors():
            if (tensor.dtype, tensor.shape) not in forms or not torch._is_functional_tensor(tensor):
                continue
            if not self._tracing.is_pending(tensor):
                number = self._lazy.tensor_number(tensor)
                shared |= {h for h in self._lazy.buffers_of([tensor]) if h in numbers and number not in numbers[h]}
        # In the order of the tensors: in another one their copies would be another graph.
        return [tensor for handle, own in owners.items() if handle in shared for tensor in own]

    def is_unknown(self, tensor: torch.Tensor, value: torch.Tensor) -> bool:
        """See `SharedBuffers`."""
        # What was made after the last copy is none, and no copy was made of it.
        return id(tensor) not in self._own and self._lazy.tensor_number(value) <= self._newest

    def are_read(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether something that is pending may read one of these tensors."""
        # Of a tensor that is part of no graph it names the value alone.
        return any("," in name for name in map(_C._unique_id_for_ir_and_data, tensors))

    def _mark(self, tensor: torch.Tensor) -> tuple[int, int, int]:
        (storage,), (writes,) = self._lazy.storage_marks([tensor])
        # The storage's name alone may be another one's by now.
        return storage, writes, self._lazy.tensor_number(tensor)

    def _label(self, value: torch.Tensor) -> int:
        numbers, _ = _C._get_tensors_xla_device_data_node([value])
        return int(numbers[0])

    # ---- buffers of their own ------------------------------------------------------------------------

    def separate_state(self) -> None:
        """See `SharedBuffers`."""
        # What is sharded would be written back whole.
        if self._device.is_spmd() or self.copies_made() == self._separated:
            return
        self._tracing.flush()
        if not self._looked_at_all:
            self._looked_at_all = True
            self._separate_all()
        state = [tensor for reference, _ in list(self._own.values()) if (tensor := reference()) is not None]
        self.separate(self.may_share(state))
        self._label_again(state)
        self.note_separated()

    def _label_again(self, tensors: Sequence[torch.Tensor]) -> None:
        """Labels the buffers of these tensors, which nobody shares any more, as theirs.

        Copies that were read and are gone were the last to use them. The results of the step would get new buffers
        then, which makes it another executable.
        """
        values = list(map(self._values.snapshot, tensors))
        others = [
            (tensor, value)
            for tensor, value in zip(tensors, values, strict=True)
            if not self._tracing.is_pending(value) and self._label(value) != self._lazy.tensor_number(value)
        ]
        if others:
            # New tensors with the same buffers: those there are have their place in graphs already.
            _, again = _C._get_tensors_xla_device_data_node([value for _, value in others])
            tensors = [tensor for tensor, _ in others]
            self._lazy.forget_writes(tensors)
            self._values.write(tensors, again)
            self.note_own_buffers(tensors)

    def note_separated(self) -> None:
        """See `SharedBuffers`."""
        self._separated = self.copies_made()
        # They rise.
        self._newest = self._lazy.tensor_number(create_placeholder_tensor((1,), torch.float32))

    def separate(self, tensors: Sequence[torch.Tensor]) -> None:
        """See `SharedBuffers`."""
        if tensors:
            self._lazy.forget_writes(tensors)
            self._values.write(tensors, self._values.copies(tensors))
            self.note_own_buffers(tensors)

    def _separate_all(self) -> None:
        self._device.wait()
        tensors = [tensor for tensor in self._tracing.live_tensors() if torch._is_functional_tensor(tensor)]
        tensors = [tensor for tensor in tensors if not self._tracing.is_pending(tensor)]
        tensors = [tensor for tensor in tensors if self._lazy.buffers_of([tensor])]
        owners: dict[int, set[int]] = {}
        handles = self._lazy.handles(tensors)
        for tensor, handle in zip(tensors, handles, strict=True):
            owners.setdefault(handle, set()).add(self._lazy.tensor_number(tensor))
        shared = [tensor for tensor, handle in zip(tensors, handles, strict=True) if len(owners[handle]) > 1]
        # Who has the label keeps the buffer. Aliases have one storage: the first one's copy is seen through all.
        first: dict[int, torch.Tensor] = {}
        values = [self._values.snapshot(tensor) for tensor in shared]
        for value in values:
            # Being asked can change it, the first time. Equal single numbers share their upload, which is no copy.
            if value.ndim:
                self._label(value)
        for tensor, value in zip(shared, values, strict=True):
            if self._label(value) != self._lazy.tensor_number(value):
                (storage,), _ = self._lazy.storage_marks([tensor])
                first.setdefault(storage, tensor)
        self.separate(list(first.values()))

    def give_own_buffers(
        self, values: Sequence[torch.Tensor], others: Iterable[torch.Tensor] | None = None
    ) -> list[torch.Tensor]:
        """See `SharedBuffers`."""
        values = [value for value in values if not self._tracing.is_pending(value)]
        if not values:
            return []
        # Before an execution has begun, its results have other handles than afterwards.
        self._device.wait()
        owners = dict(zip(self._lazy.handles(values), map(self._lazy.tensor_number, values), strict=True))
        forms = {(value.dtype, value.shape) for value in values}
        sharing: list[torch.Tensor] = []
        for tensor in self._tracing.live_tensors() if others is None else others:
            # Never as `inner`, which would make an object of it that is found among the live tensors from then on.
            if (tensor.dtype, tensor.shape) not in forms or not torch._is_functional_tensor(tensor):
                continue
            if self._tracing.is_pending(tensor):
                continue
            number = self._lazy.tensor_number(tensor)
            if any(owners.get(handle, number) != number for handle in self._lazy.buffers_of([tensor])):
                sharing.append(tensor)
        if sharing:
            self._values.write(sharing, self._values.copies(sharing))
        return sharing

    def free_for_results(self, values: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> None:
        """See `SharedBuffers`."""
        # Sharding is a part of a value: one that is made of another's data has none.
        if self._device.is_spmd():
            return
        for value, result in zip(values, results, strict=True):
            if self._tracing.is_pending(value) or self._label(value) == self._lazy.tensor_number(value):
                continue
            # The graph has the buffer already; a new tensor of it is labelled as it is looked at.
            _, (again,) = _C._get_tensors_xla_device_data_node([value])
            self._label(inner := torch._from_functional_tensor(again))
            torch.ops.aten._propagate_xla_data(inner, self._lazy.inner(result))


class _Forget:
    """Called when a tensor is gone."""

    def __init__(self, known: dict[int, _Noted], key: int) -> None:
        self._known = known
        self._key = key

    def __call__(self, reference: weakref.ref[torch.Tensor]) -> None:
        known = self._known.get(self._key)
        if known is not None and known[0] is reference:
            del self._known[self._key]


def _counted() -> tuple[int, int]:
    count = _C._xla_counter_value
    return sum(count(name) or 0 for name in _COPYING), count(_MOVING) or 0


def _uploads() -> int:
    data = _C._xla_metric_data(_UPLOADS)
    return int(data[0]) if data is not None else 0
