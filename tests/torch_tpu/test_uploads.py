"""What a step copies to the device, in each way of torch to do so."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import xla_adapters
from tests.isolation import isolated

_Upload = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _item_written(host: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    made = torch.zeros_like(like)
    made[1] = host[2]
    made[:, 2] = torch.tensor(0.5)
    return made


def _stacked(host: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """As Lightning's `grad_norm` makes a tensor of norms."""
    return torch.tensor([like.sum(), like[0].norm(), host[1], like[1, 2]], device=like.device)


UPLOADS: dict[str, _Upload] = {
    "to": lambda host, like: host.to(like.device),
    "to like another": lambda host, like: host.to(like),
    "type_as": lambda host, like: host.type_as(like),
    "tensor": lambda host, like: torch.tensor(host.tolist(), device=like.device),
    "as_tensor": lambda host, like: torch.as_tensor(host.numpy(), device=like.device),
    "asarray": lambda host, like: torch.asarray(host.numpy(), device=like.device),
    "new_tensor": lambda host, like: like.new_tensor(host.tolist()),
    "scalar_tensor": lambda host, like: torch.scalar_tensor(3, device=like.device),
    "copy_": lambda host, like: torch.empty_like(like).copy_(host),
    "a list of numbers on the device": _stacked,
    "an item": _item_written,
}


@isolated
@pytest.mark.parametrize("name", list(UPLOADS))
def test_uploads_in_a_step(name: str) -> None:
    upload, host, values = UPLOADS[name], torch.tensor([0.25, 0.5, 0.75, 1.0]), torch.rand(4, 4)

    def product(values: torch.Tensor) -> torch.Tensor:
        return values * upload(host, values)

    expected = product(values)
    xla_adapters.initialize()
    step = xla_adapters.step(product)
    for _ in range(2):
        with xla_adapters.count() as counts:
            found = step(values.to("tpu"))
        torch.testing.assert_close(found.cpu(), expected, rtol=1e-6, atol=1e-6)
    assert (counts.executions, counts.compiles, counts.eager_ops) == (1, 0, 0)
