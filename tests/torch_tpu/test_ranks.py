"""Ranks of TorchTPU in loops of one's own: the numbers of one process in one launch a step; divergence is an error."""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import pickle
import re
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import xla_adapters
from tests.isolation import run_in_child
from tests.torch_tpu import stand_in
from tests.torch_tpu.ranks import on_ranks, outcomes_on_ranks, rank
from xla_adapters import ConfigError, UnsupportedOptionError
from xla_adapters.errors import RankError
from xla_adapters.runtime.torch_tpu.operators import mend_scans
from xla_adapters.sharding import distribute_module
from xla_adapters.sharding.distribute import place_batch


def _net(*more: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), *more, nn.Tanh(), nn.Linear(16, 4))


def _batches(count: int = 6) -> list[torch.Tensor]:
    return list(torch.randn(count, 8, 8, generator=torch.Generator().manual_seed(1)))


def _part(batch: torch.Tensor) -> torch.Tensor:
    return batch.chunk(dist.get_world_size())[dist.get_rank()]


def _distributed(model: nn.Module) -> nn.Module:
    xla_adapters.initialize(spmd=True)
    return distribute_module(model, partition_fn="dp")


def _training(model: nn.Module, optimizer: torch.optim.Optimizer, micro_batches: int = 1) -> Callable[..., Any]:
    def train(batch: torch.Tensor) -> torch.Tensor:
        losses = []
        for part in batch.chunk(micro_batches):
            loss = model(part).square().mean()
            (loss / micro_batches).backward()
            losses.append(loss.detach())
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(losses).mean()

    return train


def _weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().cpu() for name, value in model.state_dict().items()}


def _on_one(micro_batches: int = 1) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = _net()
    train = _training(model, torch.optim.AdamW(model.parameters(), 0.05), micro_batches)
    return [train(batch).item() for batch in _batches()], _weights(model)


def _on_a_rank(micro_batches: int = 1) -> dict[str, Any]:
    model = _distributed(_net())
    step = xla_adapters.CompiledStep(_training(model, torch.optim.AdamW(model.parameters(), 0.05), micro_batches))
    losses, launches = [], []
    for batch in _batches():
        before = stand_in.counts()
        loss = step(_part(batch))
        torch.accelerator.synchronize()
        launches.append(stand_in.counts().since(before).executions)
        losses.append(loss.item())
    return {
        "losses": losses,
        "launches": launches,
        "replays": step.replays,
        "programs": len(step.events),
        "weights": _weights(model),
    }


@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 1), (4, 1), (2, 2)])
def test_a_step_is_that_of_one_process_in_one_launch(ranks: int, micro_batches: int) -> None:
    losses, weights = run_in_child(functools.partial(_on_one, micro_batches))
    found = on_ranks(ranks, functools.partial(_on_a_rank, micro_batches))
    means = torch.tensor([each["losses"] for each in found]).mean(0)
    torch.testing.assert_close(means, torch.tensor(losses), rtol=0, atol=1e-5)
    for each in found:
        assert each["launches"] == [1] * 6
        assert (each["replays"], each["programs"]) == (4, 1)
        for name, value in each["weights"].items():
            torch.testing.assert_close(value, weights[name], rtol=0, atol=1e-5)
            assert torch.equal(value, found[0]["weights"][name])


def _other_weights() -> tuple[float, float]:
    torch.manual_seed(rank())
    model = nn.BatchNorm1d(4)
    nn.init.normal_(model.weight)
    own = model.weight.sum().item()
    return own, _distributed(model).weight.sum().item()  # type: ignore[operator,union-attr]


def test_all_begin_with_the_weights_of_the_first() -> None:
    (first, of_first), (second, of_second) = on_ranks(2, _other_weights)
    assert first != second
    assert of_first == pytest.approx(first, abs=1e-6)
    assert of_second == pytest.approx(first, abs=1e-6)


class _Centered(nn.Module):
    """Subtracts a running mean, and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.mean.mul_(0.9).add_(rows.mean(0), alpha=0.1)
            self.count.add_(1)
        return rows - self.mean


def _with_buffers() -> nn.Sequential:
    return nn.Sequential(_Centered(), *_net(nn.BatchNorm1d(16)))


def _buffered() -> tuple[list[float], dict[str, torch.Tensor]]:
    model = _distributed(_with_buffers())
    step = xla_adapters.CompiledStep(_training(model, torch.optim.SGD(model.parameters(), 0.1)))
    losses = [step(_part(batch)).item() for batch in _batches(4)]
    assert step.replays == 2, step.reasons
    return losses, _weights(model)


def _buffered_by_torch() -> tuple[list[float], dict[str, torch.Tensor]]:
    """DistributedDataParallel on the CPU, whose buffers are those of the first rank when a step begins."""
    dist.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(_with_buffers())
    train = _training(model, torch.optim.SGD(model.parameters(), 0.1))
    losses = [train(_part(batch)).item() for batch in _batches(4)]
    for buffer in model.module.buffers():
        dist.broadcast(buffer, 0)
    return losses, _weights(model.module)


def test_buffers_are_those_of_the_first_rank_as_with_torch() -> None:
    found, expected = on_ranks(2, _buffered), on_ranks(2, _buffered_by_torch)
    for (losses, state), (losses_of_torch, state_of_torch) in zip(found, expected, strict=True):
        assert losses == pytest.approx(losses_of_torch, abs=1e-5)
        for name, value in state_of_torch.items():
            torch.testing.assert_close(state[name], value, rtol=0, atol=1e-5, msg=name)


def _assigned(on_one: bool) -> dict[str, torch.Tensor]:
    model: Any = _net() if on_one else _distributed(_net())
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, 0.1)
    for batch in _batches(3):
        rows = batch if on_one else _part(batch).to("tpu")
        with contextlib.nullcontext() if on_one else xla_adapters.step():
            loss = model(rows).square().mean()
            for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
                parameter.grad = gradient
            optimizer.step()
    return _weights(model)


def _thawed(on_one: bool) -> dict[str, torch.Tensor]:
    model: Any = _net()
    model[0].requires_grad_(False)
    if not on_one:
        model = _distributed(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for number, batch in enumerate(_batches(4)):
        if number == 2:
            model[0].requires_grad_(True)
            model[2].requires_grad_(False)
        train = _training(model, optimizer)
        if on_one:
            train(batch)
        else:
            with xla_adapters.step():
                train(_part(batch).to("tpu"))
    return _weights(model)


def test_parameters_that_were_frozen_at_first() -> None:
    expected = run_in_child(functools.partial(_thawed, True))
    for weights in on_ranks(2, functools.partial(_thawed, False)):
        for name, value in weights.items():
            torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-5)


def _interrupted() -> list[dict[str, torch.Tensor]]:
    found = []
    for fails in (True, False):
        model: Any = _distributed(_net())
        train = _training(model, torch.optim.SGD(model.parameters(), 0.1))

        def fail(gradient: torch.Tensor) -> None:
            raise ValueError("in the backward")

        for batch in _batches(3):
            if fails:
                handle = model[2].weight.register_hook(fail)
                with pytest.raises(ValueError, match="in the backward"), xla_adapters.step():
                    train(_part(batch).to("tpu"))
                handle.remove()
            with xla_adapters.step():
                train(_part(batch).to("tpu"))
        found.append(_weights(model))
    return found


def test_a_backward_that_fails_leaves_the_next_one_right() -> None:
    for after_failures, without in on_ranks(2, _interrupted):
        for name, value in without.items():
            assert torch.equal(after_failures[name], value), name


def _forgotten() -> str:
    model, other = _distributed(_net()), _net().to("tpu")
    optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()], 0.1)
    with pytest.raises(RankError) as raised, xla_adapters.step():
        (model(_part(_batches()[0]).to("tpu")) * other(torch.ones(1, 8).to("tpu"))).sum().backward()
        optimizer.step()
    return str(raised.value)


def test_a_model_that_was_not_distributed_is_no_part_of_an_update() -> None:
    for said in on_ranks(2, _forgotten):
        assert said.startswith("SGD is about to update 4 parameters (of the shapes [16, 8], [16], [4, 16])"), said


def _zeroed(on_one: bool) -> dict[str, torch.Tensor]:
    """A backward whose gradients are dropped, and others assigned in their place."""
    model: Any = _net() if on_one else _distributed(_net())
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, 0.1)
    for batch in _batches(3):
        rows = batch if on_one else _part(batch).to("tpu")
        with contextlib.nullcontext() if on_one else xla_adapters.step():
            model(rows).sum().backward()
            optimizer.zero_grad()
            gradients = torch.autograd.grad(model(rows).square().mean(), parameters)
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
            del gradients
            optimizer.step()
    return _weights(model)


@pytest.mark.parametrize("train", [_assigned, _zeroed])
def test_gradients_that_are_assigned_are_averaged_before_the_update(train: Callable[[bool], Any]) -> None:
    """Also those that replace averages."""
    expected = run_in_child(functools.partial(train, True))
    for weights in on_ranks(2, functools.partial(train, False)):
        for name, value in weights.items():
            torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-5)


def _undistributed() -> str:
    xla_adapters.initialize(spmd=True)
    model = _net().to("tpu")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(RankError) as raised, xla_adapters.step():
        model(torch.ones(1, 8).to("tpu")).sum().backward()
        optimizer.step()
    return str(raised.value)


def test_a_loop_without_a_distributed_model_does_not_train() -> None:
    assert all("give it to xla_adapters.distribute_module" in said for said in on_ranks(2, _undistributed))


def _copied() -> tuple[bool, bytes]:
    model = _distributed(_net())
    with xla_adapters.step():
        model(_part(_batches()[0]).to("tpu")).sum().backward()
    again = copy.deepcopy(model)
    pickled = pickle.dumps(model.cpu())
    return all(map(torch.equal, _weights(again).values(), _weights(pickle.loads(pickled)).values())), pickled


def test_a_model_can_be_copied_and_pickled() -> None:
    (is_same, pickled), _ = on_ranks(2, _copied)
    assert is_same
    # In a process that is no rank.
    assert run_in_child(lambda: list(pickle.loads(pickled)(torch.ones(1, 8)).shape)) == [1, 4]


# ---- scans ---------------------------------------------------------------------------------------------


def _scans() -> list[tuple[str, bool]]:
    xla_adapters.initialize(spmd=True)
    mend_scans()
    values = torch.randn(3, 7, generator=torch.Generator().manual_seed(0))
    values[1, 2] = values[1, 3] = values[1].max() + 1
    values[2, 4] = torch.nan
    functions = {
        "cumsum": lambda x: x.cumsum(1),
        "cumsum of integers": lambda x: (x > 0).cumsum(-1),
        "cumsum of one row": lambda x: x[:1].cumsum(0),
        "cumprod": lambda x: x.cumprod(0),
        "logcumsumexp": lambda x: x[:2].logcumsumexp(1),
        "cummax": lambda x: torch.cat([part.double() for part in x.cummax(1)]),
        "cummin": lambda x: torch.cat([part.double() for part in x.cummin(1)]),
    }
    found = []
    for name, function in functions.items():
        with xla_adapters.step():
            result = function(values.to("tpu"))
            total = result.double().clone()
            dist.all_reduce(total)
        expected = function(values)
        close = torch.allclose(result.cpu().double(), expected.double(), rtol=0, atol=1e-5, equal_nan=True)
        twice = torch.allclose(total.cpu(), 2 * expected.double(), rtol=0, atol=1e-4, equal_nan=True)
        found.append((name, close and twice and result.dtype == expected.dtype))
    return found


def test_scans_compile_in_programs_of_several_ranks() -> None:
    for found in on_ranks(2, _scans):
        assert [name for name, right in found if not right] == []


# ---- divergence ----------------------------------------------------------------------------------------


def _diverging(how: str) -> str:
    model = _distributed(_net())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    train = _training(model, optimizer)
    try:
        for number, batch in enumerate(_batches()):
            other = rank() == 1 and number == 3
            part = _part(batch)
            if how == "shape" and other:
                part = part[:3]
            if how == "learning rate" and other:
                optimizer.param_groups[0]["lr"] = 0.2
            with xla_adapters.step():
                if how == "error" and other:
                    raise ValueError("an error of mine")
                loss = train(part.to("tpu"))
                if how == "read" and other:
                    print(loss.item())
                if how == "collective" and other:
                    dist.all_reduce(loss)
    except Exception as error:  # noqa: BLE001 (which one it is, is what is tested)
        return f"{number}: {type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.parametrize(
    ("how", "first", "second"),
    [
        (
            "shape",
            r"RankError: rank 0 launches.*their operations differ",
            r"RankError: rank 1 launches",
        ),
        ("learning rate", r"RankError: rank 0 launches.*: -0\.1 here and -0\.2 on rank 1", r"RankError"),
        (
            "error",
            r"RankError: rank 1 has failed.*ValueError: an error of mine \(.*test_ranks\.py:\d+\)",
            r"ValueError",
        ),
        ("read", r"RankError: rank 1 has failed.*TensorReadError.*print\(loss\.item\(\)\)", r"TensorReadError"),
        ("collective", r"RankError: rank 0 launches.*their operations differ", r"RankError: rank 1 launches"),
    ],
)
def test_a_rank_that_does_something_else_is_named(how: str, first: str, second: str) -> None:
    found = on_ranks(2, functools.partial(_diverging, how))
    for said, expected in zip(found, (first, second), strict=True):
        assert re.search(f"(?s)^3: {expected}", said), said


def _killed() -> str:
    model = _distributed(_net())
    step = xla_adapters.CompiledStep(_training(model, torch.optim.SGD(model.parameters(), 0.1)))
    try:
        for number, batch in enumerate(_batches(20)):
            step(_part(batch))
            if rank() == 1 and number == 7:
                os.kill(os.getpid(), signal.SIGKILL)
    except RankError as error:
        return str(error)
    return "nothing"


def test_a_rank_that_is_killed_ends_the_others() -> None:
    first, second = outcomes_on_ranks(2, _killed)
    assert second.error == "the process died with signal 9"
    assert "has lost another rank" in first.value
    assert "resume from the newest checkpoint" in first.value


# ---- what is not there -----------------------------------------------------------------------------------


def _refused() -> list[str]:
    xla_adapters.initialize(spmd=True)
    said = []
    for options in (
        {"partition_fn": "2d"},
        {"partition_fn": None},
        {"partition_fn": "dp", "input_fn": lambda a, b, c: b},
    ):
        with pytest.raises(UnsupportedOptionError) as refused:
            distribute_module(_net(), **options)
        said.append(str(refused.value))
    model = distribute_module(_net(), partition_fn="AUTO")
    with pytest.raises(ConfigError, match="call it once"):
        distribute_module(model, partition_fn="dp")
    assert place_batch(model, {"x": torch.ones(2)})["x"].device == torch.device("tpu:0")
    return said


def test_what_ranks_cannot_do_is_refused() -> None:
    for both, nothing, function in on_ranks(2, _refused):
        assert "sharding='2d'" in both
        assert "partition_fn='dp'" in nothing
        assert "partition_fn='dp'" in function


@pytest.mark.isolated
def test_a_loop_for_ranks_runs_in_one_process() -> None:
    losses, weights = _on_one()
    found = _on_a_rank_alone()
    assert found["losses"] == pytest.approx(losses, abs=1e-5)
    for name, value in found["weights"].items():
        torch.testing.assert_close(value, weights[name], rtol=0, atol=1e-5)


def _on_a_rank_alone() -> dict[str, Any]:
    model = _distributed(_net())
    step = xla_adapters.CompiledStep(_training(model, torch.optim.AdamW(model.parameters(), 0.05)))
    return {"losses": [step(batch).item() for batch in _batches()], "weights": _weights(model)}


def _of_the_host_alone() -> None:
    dist.init_process_group("gloo")
    with pytest.raises(ConfigError, match="cpu:gloo,tpu:tpu_dist"):
        xla_adapters.initialize(spmd=True)


def test_a_group_of_the_host_alone_says_what_it_lacks() -> None:
    on_ranks(2, _of_the_host_alone)


def _group_of_the_user() -> tuple[list[float], list[float]]:
    # As accelerate makes it: for the device alone.
    dist.init_process_group("tpu_dist")
    xla_adapters.initialize(spmd=True)
    host, device = torch.ones(2), torch.ones(2).to("tpu")
    dist.all_reduce(host)
    dist.all_reduce(device)
    return host.tolist(), device.tolist()


def test_a_group_that_was_made_before_exchanges_values_of_the_host_too() -> None:
    """`_device_types`, `_register_backend`, `_get_backend` and `_set_group_name` of a process group."""
    assert on_ranks(2, _group_of_the_user) == [([2.0, 2.0], [2.0, 2.0])] * 2
