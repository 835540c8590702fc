"""The stand-in for a TPU behaves as torch_tpu on one; another version of torch_tpu trains operation by operation."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from importlib import metadata

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import xla_adapters
from tests.torch_tpu import stand_in
from tests.torch_tpu.nets import Train, batches, net_on, training
from xla_adapters import CompiledStep, UnsupportedOptionError, runtime

pytestmark = pytest.mark.isolated


def _losses(device: str, wrap: Callable[[Train], Train] = lambda train: train) -> list[float]:
    net = net_on(device)
    train = wrap(training(net, torch.optim.AdamW(net.parameters(), lr=1e-2)))
    return [train(*batch).item() for batch in batches(device, 4)]


def test_eager_training_is_that_of_the_cpu() -> None:
    assert torch.accelerator.current_accelerator() == torch.device("tpu")
    torch.testing.assert_close(_losses("tpu"), _losses("cpu"), rtol=0, atol=1e-5)


def test_torch_tpu_alone_unties_the_weights_of_a_model_that_is_moved() -> None:
    """GPT-2's embedding then trains without the gradient of the head, and nothing says so."""
    config = GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=16, n_positions=8, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config)
    assert model.lm_head.weight is model.transformer.wte.weight
    model.to("tpu")
    assert model.lm_head.weight is not model.transformer.wte.weight


def test_what_passes_through_the_plugin_is_counted() -> None:
    weight = torch.ones(2, 3).to("tpu")
    (weight + 1).cpu()
    before = stand_in.counts()
    assert (weight + 1).cpu().tolist() == [[2.0] * 3] * 2
    assert stand_in.counts().since(before) == stand_in.Counts(0, 1, 0, 1)
    (weight * 3 - 1).exp().sum().item()
    after = stand_in.counts().since(before)
    assert after.compiles >= 1
    assert after.executions > 1


def test_it_says_so_and_trains_operation_by_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    version = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: "0.3.1" if name == "torch_tpu" else version(name))
    monkeypatch.setattr(runtime, "_runtime", None)
    expected = _losses("cpu")
    with pytest.warns(UserWarning, match=r"torch_tpu 0\.3\.1 is installed.*operation by operation"):
        xla_adapters.initialize()
    with warnings.catch_warnings(record=True) as seen, xla_adapters.count() as counts:
        warnings.simplefilter("always")
        assert _losses("tpu", CompiledStep) == pytest.approx(expected, abs=1e-5)
    said = [str(warning.message) for warning in seen if "replayed" in str(warning.message)]
    assert said == [
        "the runtime torch_tpu cannot trace steps: steps are executed operation by operation instead of being replayed"
    ]
    assert counts.executions == 0
    assert counts.eager_ops > 5
    with pytest.raises(UnsupportedOptionError, match="tensors without memory"):
        _ = xla_adapters.get_runtime().abstract
