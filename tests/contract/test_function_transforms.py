"""What `xla_adapters.utils.torch_modes` relies on in torch: wrappers can be opened, and results told."""

from __future__ import annotations

import torch
from torch._C import _functorch
from torch._functorch import eager_transforms, vmap

from tests.isolation import isolated
from xla_adapters.utils.torch_modes import in_transform, results_of_transforms, unwrapped


@isolated
def test_a_wrapped_tensor_is_opened_and_a_result_is_told() -> None:
    """`torch._C._functorch.is_functorch_wrapped_tensor`, `torch._C._functorch.get_unwrapped`, and
    `torch._C._are_functorch_transforms_active`; `_remove_batch_dim` of `torch._functorch.vmap` and
    `_unwrap_for_grad` of `torch._functorch.eager_transforms` end a transform."""
    value = torch.arange(6.0).reshape(2, 3)
    seen: list[bool] = []

    def total(row: torch.Tensor) -> torch.Tensor:
        assert _functorch.is_functorch_wrapped_tensor(row)
        seen.append(in_transform())
        assert unwrapped(row).data_ptr() == _functorch.get_unwrapped(row).data_ptr() == value.data_ptr()
        return row.sum()

    told: list[torch.Tensor] = []
    ends = (vmap._remove_batch_dim, eager_transforms._unwrap_for_grad)  # type: ignore[attr-defined]
    with results_of_transforms(told.append):
        sums = torch.func.vmap(total)(value)
        slope = torch.func.grad(total)(value)
    assert (vmap._remove_batch_dim, eager_transforms._unwrap_for_grad) == ends  # type: ignore[attr-defined]
    assert all(any(tensor is result for tensor in told) for result in (sums, slope))
    assert seen == [True, True]
    assert not in_transform()
    assert unwrapped(value) is value


@isolated
def test_what_is_made_with_transforms_off_is_not_wrapped() -> None:
    """`torch._C._DisableFuncTorch`."""

    def wrapped(value: torch.Tensor) -> torch.Tensor:
        with torch._C._DisableFuncTorch():
            assert not _functorch.is_functorch_wrapped_tensor(torch.ones(2).clone())
        return value.sum()

    torch.func.grad(wrapped)(torch.ones(2))
