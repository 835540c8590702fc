"""`TPUAbstractTensors`: TorchTPU's placeholders outside of steps, and programs for a compiler elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch_tpu._internal.compile import tpu_torch_compile as _compiler
from torch_tpu._internal.utils import hardware as _hardware


class TPUAbstractTensors:
    """`AbstractTensors` on TorchTPU."""

    def prepare(self) -> None:
        """See `AbstractTensors`; a plugin that `TPU_LIBRARY_PATH` names stands in for the device."""
        _hardware.get_tpu_device_count = lambda: 1
        _compiler.push_enable_tracebacks(True)

    def placeholder(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """See `AbstractTensors`."""
        found: torch.Tensor = _compiler.placeholder(list(shape), dtype)
        return found

    def lower(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> tuple[bytes, list[int | None]]:
        """See `AbstractTensors`; each input is a parameter."""
        module = _compiler.build_mlir(list(outputs), list(inputs))
        text: str = _compiler.serialize_mlir_text(module, enable_debug_info=True)
        return text.encode(), list(range(len(inputs)))
