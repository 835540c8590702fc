"""`XLAAbstractTensors`: torch_xla's placeholders, and its lowering."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch_xla
from torch_xla.core.xla_builder import Shape, Type

_C = torch_xla._XLAC
_TYPES = {
    torch.float32: Type.F32,
    torch.float64: Type.F64,
    torch.bfloat16: Type.BF16,
    torch.float16: Type.F16,
    torch.int64: Type.S64,
    torch.int32: Type.S32,
    torch.int16: Type.S16,
    torch.int8: Type.S8,
    torch.uint8: Type.U8,
    torch.bool: Type.PRED,
    torch.complex64: Type.C64,
}


class XLAAbstractTensors:
    """`AbstractTensors` on torch_xla."""

    def prepare(self) -> None:
        """See `AbstractTensors`; a CPU is always there."""

    def placeholder(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """See `AbstractTensors`."""
        found: torch.Tensor = _C._xla_create_placeholder_tensor(Shape.create(_TYPES[dtype], tuple(shape)).shape)
        return found

    def lower(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> tuple[bytes, list[int | None]]:
        """See `AbstractTensors`."""
        context = _C.lowering.LoweringContext("step")
        context.build(list(outputs))
        numbers = [context.tensor_parameter_id(tensor) for tensor in inputs]
        return bytes(context.hlo()), [number if number >= 0 else None for number in numbers]
