"""The host prepares the next step while the device executes one."""

from __future__ import annotations

from typing import Any
from weakref import ref

import pytest
import torch

import xla_adapters
from tests.core.replay_twins import Twin
from tests.isolation import isolated
from xla_adapters.backend.in_flight import EXECUTIONS_KEPT, TakenValues
from xla_adapters.replay.run_ahead import SECONDS_AHEAD, WRITES_KEPT, RunAhead


def test_values_live_until_others_have_followed() -> None:
    taken = TakenValues(2)
    added = []
    for _ in range(4):
        value = torch.empty(0)
        taken.add([value])
        added.append(ref(value))
        del value
    assert [value() is None for value in added] == [True, True, False, False]


@pytest.mark.parametrize(("seconds", "waits"), [(0.001, 5), (0.1, 7), (0.25, 17), (2.0, 33)])
def test_the_host_is_no_more_steps_ahead_than_the_device_does_in_half_a_second(seconds: float, waits: int) -> None:
    # The host takes no time at all: what the device has to do then waits at each wait.
    now, behind, done = 0.0, 0.0, 0
    ahead = RunAhead(clock=lambda: now)

    def forget() -> None:
        nonlocal now, behind, done
        now, behind, done = now + behind, 0.0, done + 1

    worst = 0.0
    for step in range(40):
        behind += seconds
        if step >= WRITES_KEPT:
            worst = max(worst, behind)
        ahead.written(forget)
    assert worst <= max(SECONDS_AHEAD, seconds)
    assert done == waits


@isolated
def test_what_a_replay_takes_outlives_the_execution() -> None:
    """Letting go of a value waits for the execution that took it: nobody does before others have followed."""
    twin = Twin("auto")
    twin.run(6)
    backend: Any = xla_adapters.get_backend()
    parameters = list(twin.model.parameters())

    def numbers(tensors: list[torch.Tensor]) -> set[int]:
        return {backend.tensor_number(tensor) for tensor in tensors}

    former = numbers([backend.snapshot(parameter) for parameter in parameters])
    twin.run(1)
    held = backend._taken._taken
    assert len(held) == EXECUTIONS_KEPT
    assert former <= numbers(held[-1])
    # A tensor of the program would have the new value by now, and have let go of the one that was taken.
    assert not any(torch._is_functional_tensor(value) for values in held for value in values)
    assert numbers([backend.snapshot(parameter) for parameter in parameters]).isdisjoint(numbers(held[-1]))
    twin.run(EXECUTIONS_KEPT)
    assert former.isdisjoint(set().union(*map(numbers, held)))
    assert twin.step.replays == 7


@isolated
def test_steps_in_one_execution_too() -> None:
    twin = Twin("auto", config={"steps_per_execution": 2})
    twin.run(10)
    backend: Any = xla_adapters.get_backend()
    held = backend._taken._taken
    former = {backend.tensor_number(backend.snapshot(parameter)) for parameter in twin.model.parameters()}
    twin.run(2)
    assert former <= {backend.tensor_number(value) for value in held[-1]}
    assert not any(torch._is_functional_tensor(value) for values in held for value in values)
