"""Recurrent layers over packed sequences, and GRUs, as on the CPU."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import xla_adapters
from tests.isolation import isolated
from xla_adapters.errors import HostTensorError

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


@isolated
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


@isolated
def test_a_gru_in_two_directions_given_by_position() -> None:
    xla_adapters.initialize()
    there = torch.nn.GRU(3, 4, 1, True, False, 0.0, True).to("xla")
    with xla_adapters.step():
        outputs, last = there(torch.ones(5, 2, 3, device="xla"))
    assert (outputs.shape, last.shape) == ((5, 2, 8), (2, 2, 4))


@isolated
def test_lengths_on_the_device_and_of_another_batch_are_refused() -> None:
    xla_adapters.initialize()
    values = torch.ones(5, 4, 3, device="xla")
    with pytest.raises(HostTensorError, match=r"each list of lengths has a graph"):
        torch._VF._pack_padded_sequence(values, torch.tensor(_LENGTHS, device="xla"), False)  # type: ignore[attr-defined]
    for lengths in ([5, 4], [2, 3, 4, 5], [5, 4, 2, 0]):
        with pytest.raises(ValueError, match="lengths"):
            torch._VF._pack_padded_sequence(values, torch.tensor(lengths), False)  # type: ignore[attr-defined]
