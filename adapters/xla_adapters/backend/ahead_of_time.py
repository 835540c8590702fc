"""`AheadOfTime`: the part of the seam that compiles what is pending and does not execute it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch_xla
from torch_xla.utils.buffer_donor_context import alias_with_buffer_donor_config

_C = torch_xla._XLAC


class AheadOfTime:
    """Mixed into `PJRTBackend`."""

    def former_values(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The values as they are now, by other tensors of the same buffers, for `compile_only`."""
        kept = []
        for tensor in tensors:
            torch._sync(tensor)  # type: ignore[attr-defined,no-untyped-call]
            inner = torch._from_functional_tensor(tensor)
            kept.append(torch._from_functional_tensor(inner.clone()))
        return kept

    def compile_only(self, pending: Sequence[torch.Tensor], former: Sequence[torch.Tensor]) -> None:
        """Compiles the graph of the pending tensors; their updates may use the buffers of former values.

        Execution is not allowed while a step is traced, and torch_xla counts this as one.
        """
        for tensor in former:
            _C._set_buffer_donation(tensor, True)
        allowed = _C._get_allow_execution()
        _C._set_allow_execution(True)
        try:
            with alias_with_buffer_donor_config(True):
                # In the order in which a sync takes them: the same program each time.
                _C._xla_warm_up_cache(sorted(pending, key=_C._xla_get_tensor_id), [])
        finally:
            _C._set_allow_execution(allowed)
            for tensor in former:
                _C._set_buffer_donation(tensor, False)
