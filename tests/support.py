"""What tests share: a loop with every kind of state, its state bit by bit, a stream of data, a damaged file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils.data import IterableDataset

import xla_adapters
from tests.device import DEVICE


class Stream(IterableDataset[Any]):
    """Samples without a length."""

    def __init__(self, samples: Any) -> None:
        self._samples = list(samples)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._samples)


def half(**parameters: Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrizes a test with every second combination of three or more values.

    Those of any two parameters meet, as long as another one has two values.
    """
    combinations = product(*(enumerate(values) for values in parameters.values()))
    chosen = [tuple(value for _, value in pairs) for pairs in combinations if not sum(at for at, _ in pairs) % 2]
    return pytest.mark.parametrize(tuple(parameters), chosen)


def flip(path: Path) -> None:
    """Changes a bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


class Net(nn.Module):
    """Parameters, running statistics, dropout, and buffers that are written in odd ways."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.dropout = nn.Dropout(0.5)
        self.last = nn.Linear(8, 2)
        self.register_buffer("by_slice", torch.zeros(4))
        self.register_buffer("by_view", torch.zeros(2, 2))
        self.register_buffer("by_data", torch.zeros(3))
        self.register_buffer("rebound", torch.zeros(()))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.first(batch))
        with torch.no_grad():
            self.by_slice[1:3] += hidden.detach().sum()
            self.by_view.view(-1)[2].add_(hidden.detach().mean())
            self.by_data.data.mul_(0.9).add_(1)
            self.rebound = self.rebound + hidden.detach().sum()
        return self.last(self.dropout(torch.relu(hidden)))


class Loop:
    """A model, an optimizer and a batch on the device; `body` is one training step."""

    def __init__(self, optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = Net().to(DEVICE)
        self.optimizer = optimizer(self.model.parameters(), **{"lr": 0.1, **options})
        self.batch = torch.randn(6, 4).to(DEVICE)

    def forward(self) -> torch.Tensor:
        return self.model(self.batch).square().mean()

    def body(self) -> torch.Tensor:
        loss = self.forward()
        update(loss, self.optimizer)
        return loss


def update(loss: torch.Tensor, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    """Backward and update; returns the loss."""
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def state_of(model: nn.Module, *optimizers: torch.optim.Optimizer) -> dict[str, Any]:
    """Everything a step may change, on the host."""
    state: dict[str, Any] = {f"model {name}": _copy(value) for name, value in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        state[f"grad {name}"] = _copy(parameter.grad)
    for number, optimizer in enumerate(optimizers):
        saved = optimizer.state_dict()
        for index, values in saved["state"].items():
            for name, value in values.items():
                state[f"optimizer {number} {index} {name}"] = _copy(value)
        for index, group in enumerate(saved["param_groups"]):
            for name, value in group.items():
                state[f"group {number} {index} {name}"] = _copy(value)
    state["device seed"] = xla_adapters.get_runtime().random.seed()
    state["host seed"] = torch.get_rng_state()
    return state


def _copy(value: Any) -> Any:
    return value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value


def flags() -> dict[str, Any]:
    """The process-wide switches that a step sets, and must put back."""
    runtime = xla_adapters.get_runtime()
    return {
        "eager": runtime.tracing.eager(),
        "execution allowed": runtime.tracing.execution_allowed(),
        "graph name": runtime.tracing.graph_name(),
        "constants": runtime.tracing.constant_scalars(),
        "compiling": torch.compiler._is_compiling_flag,
        "function modes": torch.overrides._len_torch_function_stack(),
        "multithreading": torch._C._is_multithreading_enabled(),
        "optimizer hooks": (len(_global_optimizer_pre_hooks), len(_global_optimizer_post_hooks)),
    }


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """The names of what is not bit-identical."""
    names = [name for name in before if name not in after] + [name for name in after if name not in before]
    for name in before:
        if name in after and not _same(before[name], after[name]):
            names.append(name)
    return names


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    return type(left) is type(right) and bool(left == right)


@contextmanager
def unchanged(model: nn.Module, *optimizers: torch.optim.Optimizer, executions: int = 0) -> Iterator[None]:
    """Fails if the body changes any state or flag, or executes anything (or more than `executions` graphs)."""
    before, flags_before = state_of(model, *optimizers), flags()
    with xla_adapters.count() as counters:
        yield
    assert flags() == flags_before
    executed = (counters.compiles, counters.executions, counters.eager_ops)
    changed = differences(before, state_of(model, *optimizers))
    assert not changed, f"changed: {changed}"
    assert counters.eager_ops == 0
    assert max(executed) <= executions, f"compiles, executions, eager operations: {executed}"
