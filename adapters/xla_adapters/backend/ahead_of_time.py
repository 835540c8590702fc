"""`AheadOfTime`: the part of the seam that compiles what is pending and does not execute it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


class AheadOfTime:
    """Mixed into `PJRTBackend`.

    Attributes:
        native: the module of torch_xla's private calls.
    """

    native: Any

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
        native = self.native
        for tensor in former:
            native._set_buffer_donation(tensor, True)
        allowed, reusing = native._get_allow_execution(), native._xla_get_enable_alias_with_buffer_donor_config()
        native._set_allow_execution(True)
        native._xla_set_enable_alias_with_buffer_donor_config(True)
        try:
            # In the order in which a sync takes them: the same program each time.
            native._xla_warm_up_cache(sorted(pending, key=native._xla_get_tensor_id), [])
        finally:
            native._set_allow_execution(allowed)
            native._xla_set_enable_alias_with_buffer_donor_config(reusing)
            for tensor in former:
                native._set_buffer_donation(tensor, False)
