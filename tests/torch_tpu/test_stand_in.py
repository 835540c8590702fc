"""The stand-in for a TPU computes as the CPU does; what TorchTPU itself does that the adapters make up for."""

from __future__ import annotations

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from tests.isolation import isolated
from tests.torch_tpu import stand_in


def _losses(device: str, steps: int = 4) -> list[float]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(steps):
        inputs, classes = torch.randn(16, 8, generator=generator), torch.randint(0, 4, (16,), generator=generator)
        loss = torch.nn.functional.cross_entropy(model(inputs.to(device)), classes.to(device))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@isolated
def test_eager_training_is_that_of_the_cpu() -> None:
    assert torch.accelerator.current_accelerator() == torch.device("tpu")
    torch.testing.assert_close(_losses("tpu"), _losses("cpu"), rtol=0, atol=1e-5)


@isolated
def test_torch_tpu_alone_unties_the_weights_of_a_model_that_is_moved() -> None:
    """GPT-2's embedding then trains without the gradient of the head, and nothing says so."""
    config = GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=16, n_positions=8, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config)
    assert model.lm_head.weight is model.transformer.wte.weight
    model.to("tpu")
    assert model.lm_head.weight is not model.transformer.wte.weight


@isolated
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
