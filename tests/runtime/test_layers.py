"""Norms and recurrent layers, as on the CPU."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import xla_adapters
from tests.device import DEVICE
from xla_adapters.errors import HostTensorError

pytestmark = pytest.mark.isolated

# ---- batch norm outside of steps, with the unbiased variance of the batch -------------------------


def _trained(device: str, momentum: float | None) -> list[torch.Tensor]:
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(3, momentum=momentum).to(device)
    found = []
    for _ in range(3):
        images = torch.randn(2, 3, 2, 2).to(device).requires_grad_()
        result = norm(images)
        result.pow(3).sum().backward()
        assert images.grad is not None
        found += [result.detach().cpu(), images.grad.cpu()]
    # As `swa_utils.update_bn` does.
    with torch.no_grad():
        found.append(norm(torch.randn(2, 3, 2, 2).to(device)).cpu())
    assert norm.weight.grad is not None
    return [*found, norm.weight.grad.cpu(), *(buffer.cpu() for buffer in norm.buffers())]


@pytest.mark.parametrize("momentum", [0.1, None])
def test_as_on_the_host(momentum: float | None) -> None:
    xla_adapters.initialize()
    for found, expected in zip(_trained("xla", momentum), _trained("cpu", momentum), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


# ---- masks of torch's own transformers -------------------------------------------------------------


class _Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pair = nn.Transformer(8, 2, 1, 1, 8, dropout=0.0, batch_first=True)

    def forward(self, inputs: torch.Tensor, mask: torch.Tensor) -> Any:
        return self.pair(inputs, inputs, src_mask=mask, tgt_mask=mask)


class _Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 8, dropout=0.0, batch_first=True), 1)

    def forward(self, inputs: torch.Tensor, mask: torch.Tensor) -> Any:
        return self.encoder(inputs, mask=mask)


def _with_mask(make: Any, device: str, causal: bool, scope: Any) -> list[torch.Tensor]:
    torch.manual_seed(0)
    net = make().to(device)
    inputs = torch.randn(2, 5, 8).to(device)
    mask = nn.Transformer.generate_square_subsequent_mask(5)
    with scope:
        result = net(inputs, (mask if causal else mask.T).to(device))
        result.square().sum().backward()
    return [result.detach().cpu(), *(parameter.grad.cpu() for parameter in net.parameters())]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("make", [_Encoder, _Pair])
def test_an_attention_mask_is_not_read(make: Any, causal: bool) -> None:
    """torch compares it with a causal one."""
    xla_adapters.initialize()
    expected = _with_mask(make, "cpu", causal, nullcontext())
    found = _with_mask(make, DEVICE, causal, xla_adapters.step())
    for value, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(value, wanted, rtol=1e-4, atol=1e-4)


# ---- norms of inputs that are narrower than the weights -------------------------------------------


NORMS: dict[str, Any] = {
    "layer": lambda: nn.LayerNorm(8),
    "layer without bias": lambda: nn.LayerNorm(8, bias=False),
    "group": lambda: nn.GroupNorm(2, 8),
}


def _results(kind: str, device: str, dtype: torch.dtype, scope: Any) -> list[torch.Tensor]:
    torch.manual_seed(0)
    norm = NORMS[kind]()
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.uniform_()
    norm.to(device)
    inputs = torch.randn(4, 8).to(device, dtype).requires_grad_()
    with scope:
        result = norm(inputs)
        result.float().square().sum().backward()
    assert inputs.grad is not None
    return [result.detach().cpu(), inputs.grad.cpu(), norm.weight.grad.cpu()]


@pytest.mark.parametrize("kind", NORMS)
def test_the_result_has_the_dtype_of_the_input(kind: str) -> None:
    with xla_adapters.eager():
        for dtype in (torch.bfloat16, torch.float16):
            expected = _results(kind, "cpu", dtype, nullcontext())
            for scope in (nullcontext(), xla_adapters.step()):
                torch.testing.assert_close(_results(kind, DEVICE, dtype, scope), expected, rtol=1e-2, atol=2e-2)
        with torch.inference_mode():
            assert NORMS[kind]().to(DEVICE)(torch.ones(4, 8, device=DEVICE)).dtype is torch.float32


# ---- norms of values whose mean is far from zero --------------------------------------------------


_NORMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "layer": lambda x: functional.layer_norm(x, (16,)),
    "group": lambda x: functional.group_norm(x, 2),
    "instance": functional.instance_norm,
    "batch": lambda x: functional.batch_norm(x, None, None, training=True),
    "batch of rows": lambda x: functional.batch_norm(x[..., 0], None, None, training=True),
    "of one value": lambda x: functional.layer_norm(x[..., :1], (1,)),
}


def _computed(norm: Callable[[torch.Tensor], torch.Tensor], values: torch.Tensor) -> list[torch.Tensor]:
    values = values.detach().requires_grad_()
    result = norm(values)
    (gradient,) = torch.autograd.grad(result.pow(3).mean(), values)
    return [result.detach(), gradient]


@pytest.mark.parametrize("in_step", [True, False], ids=["step", "eager"])
def test_far_from_zero(in_step: bool) -> None:
    xla_adapters.initialize()
    for far in (0.0, 300.0, -2000.0):
        values = torch.randn(32, 4, 16) + far
        for name, norm in _NORMS.items():
            on_device = values.to("xla")
            with xla_adapters.step(name=f"{name} {far}") if in_step else nullcontext():
                found = _computed(norm, on_device)
            exact = _computed(norm, values.double())
            for ours, expected in zip(found, exact, strict=True):
                scale = expected.abs().max().item()
                difference = (ours.cpu() - expected).abs().max().item()
                # The mean itself is rounded to float32, which the gradient has.
                assert difference <= (1e-5 + 1e-7 * abs(far)) * scale + 1e-7, (name, far, difference, scale)


# ---- recurrent layers over packed sequences, and GRUs ---------------------------------------------


_LENGTHS = [5, 4, 4, 2]
_LAYERS: dict[str, dict[str, Any]] = {
    "RNN": {},
    "RNN of relu": {"nonlinearity": "relu", "bidirectional": True},
    "GRU": {"num_layers": 2},
    "GRU in two directions": {"bidirectional": True, "batch_first": True, "bias": False},
    "LSTM": {"num_layers": 2, "bidirectional": True},
    "LSTM, projected": {"proj_size": 3, "bidirectional": True, "batch_first": True},
}


def _run(layer: torch.nn.RNNBase, values: torch.Tensor, *, packed: bool) -> list[torch.Tensor]:
    """Outputs, last states, and gradients of the values and the weights."""
    values = values.clone().requires_grad_()
    if packed:
        outputs, last = layer(pack_padded_sequence(values, _LENGTHS, layer.batch_first))
        outputs = pad_packed_sequence(outputs, layer.batch_first)[0]
    else:
        outputs, last = layer(values)
    results = [outputs, *(last if isinstance(last, tuple) else (last,))]
    loss = sum((one * torch.arange(one.numel(), device=one.device).reshape(one.shape).cos()).sum() for one in results)
    assert isinstance(loss, torch.Tensor)
    return [one.detach() for one in results] + list(torch.autograd.grad(loss, [values, *layer.parameters()]))


@pytest.mark.parametrize("in_step", [True, False], ids=["step", "eager"])
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
def test_recurrent_layers(in_step: bool, packed: bool) -> None:
    xla_adapters.initialize()
    torch.manual_seed(0)
    # Of padded batches torch_xla has no layer of its own but the GRU.
    for name, options in {name: options for name, options in _LAYERS.items() if packed or "GRU" in name}.items():
        here = getattr(torch.nn, name.partition(" ")[0].rstrip(","))(3, 4, **options)
        shape = (len(_LENGTHS), _LENGTHS[0], 3) if here.batch_first else (_LENGTHS[0], len(_LENGTHS), 3)
        values = torch.randn(shape)
        there, values_there = copy.deepcopy(here).to("xla"), values.to("xla")
        if in_step:
            with xla_adapters.count() as counters, xla_adapters.step():
                found = _run(there, values_there, packed=packed)
            assert (counters.executions, counters.transfers_to_host) == (1, 0), name
        else:
            found = _run(there, values_there, packed=packed)
        for actual, expected in zip(found, _run(here, values, packed=packed), strict=True):
            torch.testing.assert_close(
                actual.cpu(), expected, rtol=1e-4, atol=1e-5, msg=lambda text, at=name: f"{at}: {text}"
            )


def test_a_gru_in_two_directions_given_by_position() -> None:
    xla_adapters.initialize()
    there = torch.nn.GRU(3, 4, 1, True, False, 0.0, True).to("xla")
    with xla_adapters.step():
        outputs, last = there(torch.ones(5, 2, 3, device="xla"))
    assert (outputs.shape, last.shape) == ((5, 2, 8), (2, 2, 4))


def test_lengths_on_the_device_and_of_another_batch_are_refused() -> None:
    xla_adapters.initialize()
    values = torch.ones(5, 4, 3, device="xla")
    with pytest.raises(HostTensorError, match=r"each list of lengths has a graph"):
        torch._VF._pack_padded_sequence(values, torch.tensor(_LENGTHS, device="xla"), False)  # type: ignore[attr-defined]
    for lengths in ([5, 4], [2, 3, 4, 5], [5, 4, 2, 0]):
        with pytest.raises(ValueError, match="lengths"):
            torch._VF._pack_padded_sequence(values, torch.tensor(lengths), False)  # type: ignore[attr-defined]


@pytest.mark.parametrize("in_step", [True, False], ids=["step", "eager"])
@pytest.mark.parametrize("form", ["padded", "in one dimension"])
@pytest.mark.parametrize("lengths", ["tensors", "numbers"])
def test_ctc(in_step: bool, form: str, lengths: str) -> None:
    """Equal labels in a row, a text without labels, one without frames, and one that does not fit into its frames."""
    xla_adapters.initialize()
    torch.manual_seed(0)
    frames, labels = torch.tensor([12, 9, 3, 12, 0]), torch.tensor([4, 2, 4, 0, 0])
    targets = torch.randint(1, 6, (5, 4))
    targets[0] = torch.tensor([2, 2, 2, 3])
    given = targets if form == "padded" else torch.cat([row[:n] for row, n in zip(targets, labels, strict=True)])
    logits = torch.randn(12, 5, 6)

    def losses(device: str) -> list[torch.Tensor]:
        values = logits.to(device).requires_grad_()
        times: list[Any] = [frames.to(device), labels.to(device)]
        if lengths == "numbers":
            times = [frames.tolist(), labels.tolist()]
        results = []
        for reduction in ("mean", "none"):
            for zero in (False, True):
                options: dict[str, Any] = {"reduction": reduction, "zero_infinity": zero}
                loss = torch.nn.functional.ctc_loss(values.log_softmax(2), given.to(device), *times, **options)
                results += [loss.detach(), *torch.autograd.grad(loss.sum(), values)]
        return results

    with xla_adapters.count() as counters, xla_adapters.step() if in_step else nullcontext():
        found = losses("xla")
    if in_step:
        assert (counters.executions, counters.transfers_to_host) == (1, 0)
    for actual, expected in zip(found, losses("cpu"), strict=True):
        torch.testing.assert_close(actual.cpu(), expected, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize(
    ("layer", "given"),
    [
        (nn.Embedding(4, 2), torch.zeros(2, 3, dtype=torch.long)),
        (nn.Sequential(nn.Embedding(4, 2), nn.Linear(2, 2)), torch.zeros(2, 3, dtype=torch.int32)),
    ],
)
def test_an_input_on_the_host_is_named_with_the_line(layer: nn.Module, given: torch.Tensor) -> None:
    xla_adapters.initialize()
    layer.to("xla")
    with pytest.raises(HostTensorError, match=r"a model on xla:0\n  where: .*test_layers.py:\d+\n.*\.to\('xla:0'\)"):
        layer(given)
    assert layer(given.to("xla")).device.type == "xla"
