"""Recognises tensors without a value: torch_xla's `scan` and `GRU` trace functions with them."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor


def is_fake(value: object) -> bool:
    """Whether a value is a placeholder for a tensor on the device, and has no value itself."""
    if is_bare(value):
        return not _under_users_mode()
    return isinstance(value, (FakeTensor, FunctionalTensor))


def is_bare(value: object) -> bool:
    """Whether a value is an XLA tensor without torch's functional wrapper.

    Operations return such tensors under a dispatch mode of the user. Their former value cannot be restored.
    """
    if not isinstance(value, torch.Tensor) or type(value) not in (torch.Tensor, torch.nn.Parameter):
        return False
    return value.device.type == "xla" and not torch._is_functional_tensor(value)


def _under_users_mode() -> bool:
    modes = torch._C._len_torch_dispatch_stack()
    # torch's own (tracing) modes have a key.
    return modes > 0 and getattr(torch._C._get_dispatch_stack_at(modes - 1), "_mode_key", None) is None
