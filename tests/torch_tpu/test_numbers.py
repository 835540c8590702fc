"""Python numbers of a step that are not its optimizer's: constants of the program, unless made tensors in the step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

import xla_adapters
from tests.torch_tpu.nets import batches, net_on
from xla_adapters import CompiledStep

pytestmark = pytest.mark.isolated


def test_a_number_of_the_loss_that_changes_is_the_cause_of_a_compile(caplog: pytest.LogCaptureFixture) -> None:
    xla_adapters.initialize()
    net = net_on("tpu")
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    weight = 0.0

    def train(inputs: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        outputs = net(inputs)
        loss = functional.cross_entropy(outputs, classes) + weight * (0.5 * outputs).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    step = CompiledStep(train)
    values = [0.25, 0.75, 0.5, 0.9, 0.1, 0.3]
    with caplog.at_level("INFO", logger="xla_adapters"):
        for value, batch in zip(values, batches("tpu", len(values)), strict=True):
            weight = value
            step(*batch)
    said = [record.message for record in caplog.records if "compiled graph" in record.message]
    assert len(said) == len(values)
    for before, now, message in zip(values, values[1:], said[1:], strict=False):
        assert f"a Python number that is a part of the graph changed, in mul: {before} -> {now}" in message
        assert "make it a tensor in the step" in message


def test_a_number_that_the_step_makes_a_tensor_costs_no_compile() -> None:
    def losses(device: str) -> list[float]:
        net = net_on(device)
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        weight = 0.0

        def train(inputs: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
            outputs = net(inputs)
            scale = torch.tensor(weight, device=inputs.device)
            loss = functional.cross_entropy(outputs, classes) + scale * outputs.square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        step = CompiledStep(train) if device == "tpu" else train
        found = []
        for number, batch in enumerate(batches(device, 12)):
            weight = number / 10
            found.append(step(*batch).item())
        return found

    expected = losses("cpu")
    xla_adapters.initialize()
    with xla_adapters.count() as counted:
        assert losses("tpu") == pytest.approx(expected, rel=1e-5)
    assert counted.compiles == 1


def test_a_number_that_changes_is_named_and_a_tensor_of_it_is_an_input(caplog: pytest.LogCaptureFixture) -> None:
    xla_adapters.initialize()
    net = net_on("tpu")
    losses = [
        lambda total, weight: weight * total,
        lambda total, weight: total + weight,
        lambda total, weight: torch.tensor(weight, device="tpu") * total,
    ]
    for loss_of, told in zip(losses, ("mul: 0.3 -> 0.4", "add: 0.3 -> 0.4", None), strict=True):

        @xla_adapters.step
        def train(
            inputs: torch.Tensor, weight: float, loss_of: Callable[[torch.Tensor, float], torch.Tensor] = loss_of
        ) -> torch.Tensor:
            return loss_of(net(inputs).square().mean(), weight).detach()

        caplog.clear()
        for weight in (0.3, 0.4):
            train(torch.ones(16, 8, device="tpu"), weight)
        messages = [record.getMessage() for record in caplog.records if "Python number" in record.getMessage()]
        assert len(messages) == (told is not None)
        for message in messages:
            assert f"a Python number that is a part of the graph changed, in {told}" in message
            assert f"{__file__}:{loss_of.__code__.co_firstlineno}" in message


@pytest.mark.parametrize("wrap", [xla_adapters.step, CompiledStep])
def test_two_numbers_in_one_call_of_an_own_optimizer(wrap: Callable[..., Any]) -> None:
    class Drifting(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.copy_(torch.add(parameter, 0.5, alpha=group["lr"]) - 0.1 * parameter.grad)

    def weights(device: str) -> list[torch.Tensor]:
        net = net_on(device)
        optimizer = Drifting(net.parameters(), {"lr": 0.25})

        def train(inputs: torch.Tensor, classes: torch.Tensor) -> None:
            functional.cross_entropy(net(inputs), classes).backward()
            optimizer.step()
            optimizer.zero_grad()

        step = wrap(train) if device == "tpu" else train
        for batch in batches(device, 4):
            step(*batch)
            optimizer.param_groups[0]["lr"] /= 2
        return [parameter.detach().cpu() for parameter in net.parameters()]

    expected = weights("cpu")
    xla_adapters.initialize()
    torch.testing.assert_close(weights("tpu"), expected, rtol=0, atol=1e-5)


# ---- uploads -----------------------------------------------------------------------------------------

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
