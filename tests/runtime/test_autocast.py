"""Autocast on the device: torch's lists of operators, not only those that torch_xla has kernels for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

import xla_adapters

pytestmark = pytest.mark.isolated

# Operators of one device only: fused kernels of CUDA and of the CPU.
_FUSED = {
    *("_cudnn_rnn", "cudnn_convolution", "cudnn_convolution_transpose", "_thnn_fused_gru_cell"),
    *("_thnn_fused_lstm_cell", "_scaled_dot_product_flash_attention"),
    *("mkldnn_rnn_layer", "_grid_sampler_2d_cpu_fallback"),
}

_LOW, _HIGH = torch.bfloat16, torch.float32
# A call of two tensors of shape (4, 4), the dtypes of the two, and of the result.
_CALLS: dict[str, tuple[Callable[..., torch.Tensor], tuple[torch.dtype, torch.dtype], torch.dtype]] = {
    "mv": (lambda x, y: torch.mv(x, y[0]), (_HIGH, _HIGH), _LOW),
    "multi_dot": (lambda x, y: torch.linalg.multi_dot([x, y, x]), (_HIGH, _LOW), _LOW),
    "exp": (lambda x, y: torch.exp(x), (_LOW, _LOW), _HIGH),
    "rsqrt": (lambda x, y: torch.rsqrt(x.abs() + 1), (_LOW, _LOW), _HIGH),
    "a power of a number": (lambda x, y: 2**x, (_LOW, _LOW), _HIGH),
    "layer norm": (lambda x, y: functional.layer_norm(x, (4,)), (_LOW, _LOW), _HIGH),
    "huber loss": (lambda x, y: functional.huber_loss(x, y), (_LOW, _HIGH), _HIGH),
    "cosine similarity": (lambda x, y: functional.cosine_similarity(x, y), (_LOW, _LOW), _HIGH),
    "sum": (lambda x, y: x.sum(), (_LOW, _LOW), _HIGH),
    "sum over a dim": (lambda x, y: x.sum(0), (_LOW, _LOW), _HIGH),
    "sum with a dtype": (lambda x, y: x.sum(0, dtype=_LOW), (_LOW, _LOW), _LOW),
    "cumsum": (lambda x, y: x.cumsum(0), (_LOW, _LOW), _HIGH),
    "norm": (lambda x, y: torch.ops.aten.norm(x, 2), (_LOW, _LOW), _HIGH),
    "norm over a dim": (lambda x, y: torch.ops.aten.norm(x, 2, [0], False), (_LOW, _LOW), _HIGH),
    "vector norm": (lambda x, y: torch.linalg.vector_norm(x), (_LOW, _LOW), _HIGH),
    "the widest of two": (lambda x, y: torch.addcmul(x, x, y), (_LOW, _HIGH), _HIGH),
    "the widest of two low ones": (lambda x, y: torch.addcmul(x, x, y), (_LOW, _LOW), _LOW),
    "atan2": (lambda x, y: torch.atan2(x, y), (_HIGH, _LOW), _HIGH),
    "interpolation": (lambda x, y: functional.interpolate(x[None, None], scale_factor=2.0), (_LOW, _LOW), _HIGH),
}


def _kernels(key: str) -> set[str]:
    """The operators that have a kernel for a dispatch key."""
    names = torch._C._dispatch_get_registrations_for_dispatch_key(key)
    return {name.removeprefix("aten::") for name in names if name.startswith("aten::")}


def test_no_operator_of_torchs_lists_is_missing() -> None:
    wanted = _kernels("AutocastCUDA") | _kernels("AutocastCPU")
    assert len(wanted - _kernels("AutocastXLA") - _FUSED) > 100
    xla_adapters.initialize()
    assert wanted - _kernels("AutocastXLA") == _FUSED


def test_dtypes_of_results() -> None:
    xla_adapters.initialize()
    wrong = {}
    for name, (call, dtypes, expected) in _CALLS.items():
        x, y = (torch.rand(4, 4).to("xla", dtype) for dtype in dtypes)
        with torch.autocast("xla", dtype=torch.bfloat16):
            found = call(x, y).dtype
        if found is not expected:
            wrong[name] = found
        with torch.autocast("xla", enabled=False):
            assert call(x.float(), y.float()).dtype is not _LOW or "dtype" in name
    assert wrong == {}


class _Attention(nn.Module):
    """Rotary embeddings make queries and keys float32, the projection leaves values bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Linear(8, 24)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        query, key, value = self.projection(inputs).chunk(3, -1)
        angle = torch.arange(8, device=inputs.device, dtype=torch.float32).cos()
        query, key, value = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in (query * angle, key * angle, value))
        return functional.scaled_dot_product_attention(query, key, value, is_causal=True)


@pytest.mark.parametrize("device", ["xla", "cpu"])
def test_attention_after_rotary_embeddings(device: str) -> None:
    xla_adapters.initialize()
    torch.manual_seed(0)
    model, inputs = _Attention(), torch.randn(2, 6, 8)
    expected = model(inputs).square().mean()
    expected.backward()
    gradient = model.projection.weight.grad
    assert gradient is not None
    model.projection.weight.grad = None
    model.to(device)
    inputs = inputs.to(device)
    with xla_adapters.count() as counters, xla_adapters.step():
        with torch.autocast(device, dtype=torch.bfloat16):
            attended = model(inputs)
        loss = attended.float().square().mean()
        loss.backward()
    assert attended.dtype is torch.bfloat16
    assert model.projection.weight.grad is not None
    if device == "xla":
        assert (counters.compiles, counters.executions, counters.transfers_to_host) == (1, 1, 0)
    torch.testing.assert_close(loss.cpu(), expected, rtol=2e-2, atol=0)
    torch.testing.assert_close(model.projection.weight.grad.cpu(), gradient, rtol=5e-2, atol=1e-3)
