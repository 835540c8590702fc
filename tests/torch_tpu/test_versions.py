"""A version of TorchTPU whose private names are not known."""

from __future__ import annotations

import warnings
from importlib import metadata

import pytest
import torch
from torch import nn

import xla_adapters
from tests.isolation import isolated
from xla_adapters import CompiledStep, UnsupportedOptionError, runtime


def _losses(device: str, *, compiled: bool) -> list[float]:
    torch.manual_seed(0)
    model = nn.Linear(4, 2).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def train(inputs: torch.Tensor) -> torch.Tensor:
        loss = model(inputs).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    step = CompiledStep(train) if compiled else train
    return [step(torch.full((2, 4), at + 1.0).to(device)).item() for at in range(5)]


@isolated
def test_it_says_so_and_trains_operation_by_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    version = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: "0.3.1" if name == "torch_tpu" else version(name))
    monkeypatch.setattr(runtime, "_runtime", None)
    expected = _losses("cpu", compiled=False)
    with pytest.warns(UserWarning, match=r"torch_tpu 0\.3\.1 is installed.*operation by operation"):
        xla_adapters.initialize()
    with warnings.catch_warnings(record=True) as seen, xla_adapters.count() as counts:
        warnings.simplefilter("always")
        assert _losses("tpu", compiled=True) == pytest.approx(expected, abs=1e-5)
    said = [str(warning.message) for warning in seen if "replayed" in str(warning.message)]
    assert said == [
        "the runtime torch_tpu cannot trace steps: steps are executed operation by operation instead of being replayed"
    ]
    assert counts.executions == 0
    assert counts.eager_ops > 5
    with pytest.raises(UnsupportedOptionError, match="tensors without memory"):
        _ = xla_adapters.get_runtime().abstract
