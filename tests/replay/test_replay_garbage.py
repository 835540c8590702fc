"""Replayed passes do not set off searches for unreachable cycles by themselves."""

from __future__ import annotations

import functools
import gc
from typing import Any

import pytest
import torch
from torch import nn

from tests.device import DEVICE
from tests.isolation import isolated
from xla_adapters import CompiledStep, XLAConfig, get_runtime
from xla_adapters.replay.replayed_call import without_collecting


@isolated
def test_not_every_replay_searches_for_cycles() -> None:
    """With 300 parameters it makes 1,200 tensors, where Python searches at every 700; half the searches are others'."""
    get_runtime().device.initialize()
    weights = nn.ParameterList(torch.ones(2) for _ in range(300)).to(DEVICE)
    optimizer = torch.optim.SGD(weights.parameters(), lr=0.01, momentum=0.9)

    @functools.partial(CompiledStep, config=XLAConfig(replay_verify_every=None))
    def step(batch: torch.Tensor) -> torch.Tensor:
        loss = sum((batch * weight).sum() for weight in weights)
        assert isinstance(loss, torch.Tensor)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    batch = torch.ones(2).to(DEVICE)
    for _ in range(4):
        step(batch)
    replayed, searches = step.replays, 0

    def note(phase: str, info: dict[str, Any]) -> None:
        nonlocal searches
        searches += phase == "start"

    gc.collect()
    gc.callbacks.append(note)
    for _ in range(10):
        step(batch)
    gc.callbacks.remove(note)
    assert step.replays == replayed + 10
    assert searches <= 7
    assert gc.isenabled()


@pytest.mark.parametrize("enabled", [True, False])
@isolated
def test_it_is_as_before_behind_it(enabled: bool) -> None:
    (gc.enable if enabled else gc.disable)()
    with pytest.raises(ValueError, match="in it"), without_collecting():
        assert not gc.isenabled()
        raise ValueError("in it")
    assert gc.isenabled() is enabled
