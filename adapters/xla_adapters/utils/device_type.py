"""`device_type`: the name of the runtime's device in torch, for code that has no runtime at hand."""

from __future__ import annotations

import torch

_TPU = "tpu"


def device_type() -> str:
    """`"tpu"` once TorchTPU is loaded, and `"xla"` otherwise."""
    return _TPU if torch._C._get_privateuse1_backend_name() == _TPU else "xla"
