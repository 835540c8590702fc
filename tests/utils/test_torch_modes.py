"""`torch.inference_mode()` on XLA devices: gradients are off, and operations work."""

from __future__ import annotations

import torch

import xla_adapters
from tests.isolation import isolated
from xla_adapters.utils.torch_modes import inference_mode_as_no_grad


@isolated
def test_inside_a_step() -> None:
    xla_adapters.initialize()
    layer = torch.nn.Linear(3, 3).to("xla")
    with xla_adapters.step():
        with torch.inference_mode():
            values = layer(torch.ones(2, 3, device="xla")).view(-1)[1:]
            assert not torch.is_grad_enabled()
        assert torch.is_grad_enabled()
    assert not values.requires_grad
    torch.testing.assert_close(values.cpu(), layer.cpu()(torch.ones(2, 3)).view(-1)[1:].detach())


def test_it_is_undone_and_false_means_what_it_did() -> None:
    stock = vars(torch.inference_mode)["__enter__"]
    with inference_mode_as_no_grad():
        inside = torch.inference_mode()
        inside.__enter__()
        assert not torch.is_grad_enabled()
        assert not torch.is_inference_mode_enabled()
    assert vars(torch.inference_mode)["__enter__"] is stock
    # Left after the patch was undone.
    inside.__exit__(None, None, None)
    assert torch.is_grad_enabled()
    with torch.inference_mode(), inference_mode_as_no_grad(), torch.inference_mode(False):
        assert not torch.is_inference_mode_enabled()
