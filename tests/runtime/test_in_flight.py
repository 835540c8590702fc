"""The host prepares the next step while the device executes one."""

from __future__ import annotations

from typing import Any
from weakref import ref

import pytest
import torch

import xla_adapters
from tests.isolation import isolated
from tests.replay.with_and_without_replay import TrainedStep
from xla_adapters.replay.launcher import WRITES_KEPT, RunAhead
from xla_adapters.runtime.torch_xla.cached_graphs import EXECUTIONS_KEPT, TakenValues


def test_values_live_until_others_have_followed() -> None:
    taken = TakenValues(2)
    added = []
    for _ in range(4):
        value = torch.empty(0)
        taken.add([value])
        added.append(ref(value))
        del value
    assert [value() is None for value in added] == [True, True, False, False]


class _Device:
    """Executions one after another, and a host that waits where it lets go of what one of them has taken."""

    def __init__(self, seconds: float, host_seconds: float) -> None:
        self.now = 0.0
        self.forgets = 0
        self._seconds = seconds
        self._host_seconds = host_seconds
        self._ends = [0.0]
        self._forgotten = 0

    def step(self, ahead: RunAhead) -> None:
        self.now += self._host_seconds
        self._ends.append(max(self.now, self._ends[-1]) + self._seconds)
        self._let_go()
        ahead.written(self._forget)

    def _forget(self) -> None:
        self.forgets += 1
        self._forgotten = len(self._ends) - 1
        self._let_go()

    def _let_go(self) -> None:
        # Both the view machinery and `TakenValues` hold what was taken.
        last = min(self._forgotten, len(self._ends) - 1 - EXECUTIONS_KEPT)
        self.now = max(self.now, self._ends[max(last, 0)])

    @property
    def behind(self) -> int:
        return sum(end > self.now for end in self._ends)


@pytest.mark.parametrize("host_seconds", [0.0, 0.01])
@pytest.mark.parametrize(
    ("seconds", "most", "forgets"),
    [(0.02, WRITES_KEPT + EXECUTIONS_KEPT, 20), (0.1, 6, 30), (0.2, 3, 55), (2.0, 3, 100)],
)
def test_the_host_is_only_so_far_ahead(seconds: float, host_seconds: float, most: int, forgets: int) -> None:
    device = _Device(seconds, host_seconds)
    ahead = RunAhead(clock=lambda: device.now)
    behind = []
    for _ in range(100):
        device.step(ahead)
        behind.append(device.behind)
    assert max(behind) <= most
    assert device.forgets <= forgets
    # And far enough for the device never to wait for it.
    assert min(behind[10:]) >= 1


@isolated
def test_what_a_replay_takes_outlives_the_execution() -> None:
    """Letting go of a value waits for the execution that took it: nobody does before others have followed."""
    trained = TrainedStep("auto")
    trained.run(6)
    runtime: Any = xla_adapters.get_runtime()
    parameters = list(trained.model.parameters())

    def numbers(tensors: list[torch.Tensor]) -> set[int]:
        return {runtime.lazy.tensor_number(tensor) for tensor in tensors}

    before = numbers([runtime.values.snapshot(parameter) for parameter in parameters])
    trained.run(1)
    held = runtime.executables._graphs._taken._taken
    assert len(held) == EXECUTIONS_KEPT
    assert before <= numbers(held[-1])
    # A tensor of the program would have the new value by now, and have let go of the one that was taken.
    assert not any(torch._is_functional_tensor(value) for values in held for value in values)
    assert numbers([runtime.values.snapshot(parameter) for parameter in parameters]).isdisjoint(numbers(held[-1]))
    trained.run(EXECUTIONS_KEPT)
    assert before.isdisjoint(set().union(*map(numbers, held)))
    assert trained.step.replays == 7
