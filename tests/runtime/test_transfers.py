"""Copies between host and device."""

from __future__ import annotations

from collections import namedtuple

import pytest
import torch
from torch import nn

import xla_adapters
from xla_adapters.runtime.transfers import to_host_in_one_transfer, uploading

pytestmark = pytest.mark.isolated

Pair = namedtuple("Pair", "first second")


def test_numbers_brought_to_the_device_in_a_step_are_inputs_of_one_graph() -> None:
    with xla_adapters.eager():
        weight = torch.ones(3).to("xla")
        with xla_adapters.count() as counters:
            for number in (0, 1, 2, 2, 3):
                with xla_adapters.step():
                    total = weight * torch.tensor(float(number), device="xla") + torch.tensor(5.0).to("xla")
                    total = total + torch.as_tensor(number, dtype=torch.float32, device="xla")
                assert total.tolist() == [2.0 * number + 5] * 3
    assert (counters.compiles, counters.executions, counters.eager_ops) == (1, 5, 0)


def test_a_list_of_device_scalars_becomes_a_tensor_without_a_read() -> None:
    with xla_adapters.eager():
        values = torch.arange(3.0).to("xla")
        with xla_adapters.count() as counters, xla_adapters.step():
            stacked = torch.tensor([values.sum(), values[1], torch.tensor(7.0)], dtype=torch.float64)
        assert stacked.device.type == "xla"
    assert (counters.executions, counters.transfers_to_host) == (1, 0)
    assert stacked.tolist() == [3.0, 1.0, 7.0]


def test_uploading_executes_nothing_and_shares_no_scalars() -> None:
    xla_adapters.initialize()
    module = nn.ParameterList([torch.tensor(0.0), torch.tensor(0.0), torch.tensor(1.0), torch.ones(3)])
    with xla_adapters.eager(), xla_adapters.count() as counters:
        with uploading():
            module.to("xla")
        for _ in range(3):
            with xla_adapters.step(), torch.no_grad():
                for number, parameter in enumerate(module):
                    parameter.add_(number)
    assert counters.compiles == 1
    assert [parameter.tolist() for parameter in module] == [0, 3, 7, [10, 10, 10]]


def test_nested_results_come_in_one_transfer() -> None:
    with xla_adapters.eager():
        values = torch.arange(2.0).to("xla")
        nested = {"a": [values, (values + 1, "text")], "b": Pair(values * 2, torch.ones(1)), "c": 3}
        with xla_adapters.count() as counters:
            on_host = to_host_in_one_transfer(nested)
    assert counters.transfers_to_host == 1
    assert on_host["a"][0].tolist() == [0, 1]
    assert on_host["a"][1][0].tolist() == [1, 2]
    assert isinstance(on_host["b"], Pair)
    assert on_host["b"].first.tolist() == [0, 2]
    assert on_host["c"] == 3


def test_a_closure_is_watched_and_the_first_update_is_the_steady_graph() -> None:
    with xla_adapters.eager():
        model = nn.Linear(4, 2).to("xla")
        optimizer = torch.optim.AdamW(model.parameters())
        batch = torch.ones(3, 4).to("xla")

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(batch).square().mean()
            loss.backward()
            return loss

        with xla_adapters.count() as counters:
            for passed in (False, True, False):
                with xla_adapters.step():
                    loss = optimizer.step(closure=closure) if passed else optimizer.step(closure)
        assert (counters.compiles, counters.executions) == (1, 3)
        assert loss.item() > 0

        def reads() -> torch.Tensor:
            loss = closure()
            loss.item()
            return loss

        before = model.weight.tolist()
        with pytest.raises(xla_adapters.TensorReadError) as caught, xla_adapters.step():
            optimizer.step(reads)
        assert caught.value.filename == __file__
        assert model.weight.tolist() == before


def test_batch_norm_keeps_the_variance_other_devices_keep() -> None:
    results = []
    for device in ("cpu", "xla"):
        torch.manual_seed(0)
        norm = nn.BatchNorm1d(4).to(device)
        with xla_adapters.eager():
            for _ in range(3):
                batch = torch.randn(8, 4).to(device)
                with xla_adapters.step():
                    norm(batch).square().mean().backward()
        results.append((norm.running_mean.tolist(), norm.running_var.tolist(), norm.num_batches_tracked.item()))
    torch.testing.assert_close(results[0], results[1], rtol=1e-6, atol=1e-6)
