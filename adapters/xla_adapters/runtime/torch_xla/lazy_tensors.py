"""`XLALazyTensors`: device tensors behind torch's functional wrappers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch_xla

from xla_adapters.runtime.interface import Device, Transfers, Values
from xla_adapters.runtime.torch_xla.tracing import has_neither

_C = torch_xla._XLAC
# Entries of torch_xla's cache of uploaded Python numbers.
_SCALAR_CACHE = 128


class XLALazyTensors:
    """`LazyTensors` of torch_xla.

    Args:
        device: of the tensors.
        transfers: to upload a value.
        values: to put a value behind a tensor.
    """

    def __init__(self, device: Device, transfers: Transfers, values: Values) -> None:
        self._device = device
        self._transfers = transfers
        self._values = values
        self._scalars_evicted = 0

    def inner(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `LazyTensors`."""
        return torch._from_functional_tensor(tensor)

    def tensor_number(self, tensor: torch.Tensor) -> int:
        """See `LazyTensors`."""
        return int(_C._xla_get_tensor_id(tensor))

    def handles(self, tensors: Sequence[torch.Tensor]) -> list[int]:
        """See `LazyTensors`; until an execution begins, a handle is the address of a placeholder."""
        return list(_C._get_tensors_handle(list(tensors)))

    def buffers_of(self, tensors: Sequence[torch.Tensor]) -> set[int]:
        """See `LazyTensors`."""
        found = set()
        for tensor in tensors:
            try:
                found.update(self.handles([tensor]))
            except RuntimeError as error:
                if "is deleted" not in str(error):
                    raise
        return found

    def aliases(self, tensors: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> list[int]:
        """See `LazyTensors`."""
        names = set(map(_C._unique_id_for_ir_and_data, others)) if tensors else set()
        return [position for position, tensor in enumerate(tensors) if _C._unique_id_for_ir_and_data(tensor) in names]

    def storage_marks(self, tensors: Sequence[torch.Tensor]) -> tuple[list[int], list[int]]:
        """See `LazyTensors`."""
        name, writes = torch._C._storage_id, torch._functionalize_mutation_counter  # type: ignore[attr-defined]
        return [name(tensor) for tensor in tensors], [writes(tensor) for tensor in tensors]

    def replace(self, tensors: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
        """See `LazyTensors`."""
        replace, commit = torch._functionalize_replace, torch._functionalize_commit_update
        for tensor, value in zip(tensors, values, strict=True):
            replace(tensor, value)
            commit(tensor)

    def update(
        self, tensors: Sequence[torch.Tensor], before: Sequence[torch.Tensor], after: Sequence[torch.Tensor]
    ) -> None:
        """See `LazyTensors`."""
        inner, replace = torch._from_functional_tensor, torch._functionalize_replace
        commit, propagate = torch._functionalize_commit_update, torch.ops.aten._propagate_xla_data
        for tensor, old, new in zip(tensors, before, map(inner, after), strict=True):
            # The sharding, and which input's buffer the value may be written to.
            propagate(old, new)
            replace(tensor, new)
            commit(tensor)

    def fill(self, tensors: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
        """See `LazyTensors`."""
        for tensor, value in zip(tensors, values, strict=True):
            tensor.copy_(self.inner(value))
        _C._clear_pending_irs(str(self._device.torch_device()))

    def forget_writes(self, tensors: Sequence[torch.Tensor]) -> None:
        """See `LazyTensors`."""
        for tensor in tensors:
            torch._sync(tensor)  # type: ignore[attr-defined,no-untyped-call]

    def separate_scalars(self) -> None:
        """See `LazyTensors`; fills torch_xla's cache of uploaded numbers with others."""
        anchor = torch.zeros(1, device=self._device.torch_device())
        for _ in range(_SCALAR_CACHE):
            self._scalars_evicted += 1
            anchor * (0.5 + self._scalars_evicted)

    def restate_dtype(self, tensor: torch.Tensor) -> None:
        """See `LazyTensors`."""
        inner = self._values.snapshot(tensor)
        again = torch._from_functional_tensor(torch.ops.aten._to_copy(inner, dtype=inner.dtype))
        # It takes over which input's buffer it may be written to; without, the update needs a second one.
        torch.ops.aten._propagate_xla_data(inner, again)
        self._values.restore(tensor, again)
        del inner
        # The view machinery holds the value before it until then: it would be one more output of the graph.
        torch._sync(tensor)  # type: ignore[attr-defined,no-untyped-call]

    def count_as_written(self, tensor: torch.Tensor) -> None:
        """See `LazyTensors`."""
        if torch._is_functional_tensor(tensor) and not torch._functionalize_mutation_counter(tensor):
            torch._functionalize_replace(tensor, torch._from_functional_tensor(tensor))
            torch._functionalize_commit_update(tensor)
            torch._sync(tensor)  # type: ignore[attr-defined,no-untyped-call]

    def give_any_value(self, tensor: torch.Tensor) -> None:
        """See `LazyTensors`."""
        try:
            _C._check_tensor_need_materialization([tensor])
        except RuntimeError as error:
            if not has_neither(error):
                raise
            inner = torch._from_functional_tensor(tensor) if torch._is_functional_tensor(tensor) else tensor
            value = self._transfers.to_device(torch.zeros(()))
            _C._replace_xla_tensor(inner, torch._from_functional_tensor(value))
