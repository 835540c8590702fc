"""Products of tensors of different dtypes fail in a step as on the CPU, at the line of the call."""

from __future__ import annotations

import traceback
from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

import xla_adapters
from tests.device import DEVICE

pytestmark = pytest.mark.isolated

_BF16 = torch.bfloat16
_Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
_PRODUCTS: dict[str, _Product] = {
    "operator": lambda x, w: x @ w.to(_BF16),
    "matmul": lambda x, w: torch.matmul(x.to(_BF16), w),
    "integers": lambda x, w: x @ w.long(),
    "linear": lambda x, w: functional.linear(x, w.to(_BF16)),
    "input of a linear": lambda x, w: functional.linear(x.to(_BF16), w),
    "bias of a linear": lambda x, w: functional.linear(x, w, w[0].to(_BF16)),
    "bmm": lambda x, w: torch.bmm(x[None], w[None].to(_BF16)),
    "baddbmm": lambda x, w: torch.baddbmm(x[None].to(_BF16), x[None], w[None]),
    "einsum": lambda x, w: torch.einsum("bi,io->bo", x, w.to(_BF16)),
    "convolution": lambda x, w: functional.conv1d(x[..., None], w[..., None].to(_BF16)),
    "attention": lambda x, w: functional.scaled_dot_product_attention(x[None], w[None].to(_BF16), x[None]),
}


def _error(product: _Product, device: str) -> str:
    x, w = torch.ones(4, 4, device=device), torch.ones(4, 4, device=device)
    with pytest.raises(RuntimeError) as caught:
        product(x, w)
    assert any(frame.name == "<lambda>" for frame in traceback.extract_tb(caught.tb))
    return str(caught.value)


def test_they_fail_as_on_the_cpu() -> None:
    xla_adapters.initialize()
    for name, product in _PRODUCTS.items():
        expected = _error(product, "cpu")
        with xla_adapters.step():
            assert _error(product, DEVICE) == expected, name


def test_an_attention_layer_of_another_dtype_fails_at_its_call() -> None:
    """torch words it in two ways, depending on the strides."""
    xla_adapters.initialize()
    with xla_adapters.step():
        assert "same dtype" in _error(
            lambda x, w: torch.nn.MultiheadAttention(4, 2).to(x.device, _BF16)(x, x, x)[0], DEVICE
        )


def test_what_the_cpu_computes_is_computed() -> None:
    xla_adapters.initialize()
    x = torch.ones(4, 4, device=DEVICE)
    with xla_adapters.step():
        outer = torch.outer(x[0], x[0].to(_BF16))
        masked = functional.scaled_dot_product_attention(x[None], x[None], x[None], torch.ones_like(x).bool())
        with torch.autocast(DEVICE, _BF16):
            product = x @ x.to(_BF16)
    assert (outer.dtype, product.dtype) == (torch.float32, _BF16)
    assert (outer.sum().item(), masked.sum().item(), product.sum().item()) == (16, 16, 64)
