"""The private calls of torch_xla that tensors without memory stand on."""

from __future__ import annotations

import torch
import torch_xla
import torch_xla.runtime as xr
from torch_xla.core.xla_builder import Shape, Type

from tests.hlo.modules import entry
from tests.isolation import isolated
from xla_adapters.hlo.protobuf import OPCODE

_C = torch_xla._XLAC


@isolated
def test_graphs_of_placeholders_are_lowered_and_nothing_executes() -> None:
    xr.global_runtime_device_count()
    # A terabyte.
    one, other = (_C._xla_create_placeholder_tensor(Shape.create(Type.F32, (2**19, 2**19)).shape) for _ in range(2))
    assert one.device == torch_xla.device()
    assert one.dtype == torch.float32
    inner = torch._from_functional_tensor(one)
    (before,), (second,) = _C._get_tensors_handle([one]), _C._get_tensors_handle([other])
    assert before != second
    assert _C._check_tensor_need_materialization([one]) == [False]
    one.add_(other)
    context = _C.lowering.LoweringContext("step")
    context.build([torch._from_functional_tensor(one)])
    numbers = [context.tensor_parameter_id(tensor) for tensor in (inner, other)]
    assert sorted(numbers) == [0, 1]
    assert (
        context.tensor_parameter_id(torch_xla._XLAC._xla_create_placeholder_tensor(Shape.create(Type.F32, (2,)).shape))
        < 0
    )
    opcodes = [item[OPCODE] for item in entry(bytes(context.hlo()))]
    assert opcodes.count(b"add") == 1
    assert opcodes[-1] == b"tuple"
    # Nothing was executed: a read of what is pending would be.
    _C._clear_pending_irs(str(torch_xla.device()))
