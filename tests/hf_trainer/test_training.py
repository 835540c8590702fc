"""Options that shape the step: accumulation, clipping, smoothing, precision, noise."""

from __future__ import annotations

import os

import pytest
import torch

import xla_adapters
from hf_trainer import Trainer
from tests.device import DEVICE
from tests.hf_trainer.scenarios import (
    Classifier,
    arguments,
    assert_close,
    assert_parity,
    gpt2,
    ours,
    token_samples,
    vector_samples,
)
from tests.support import Stream

pytestmark = pytest.mark.isolated


def test_plain_training_is_one_graph() -> None:
    run = assert_parity(gpt2, token_samples(4))
    run.assert_one_graph(4)
    # The default, adamw_torch_fused, crashes on XLA in stock transformers.
    assert run.trainer.args.optim == "adamw_torch_fused"
    # One transfer per logged step, and one at the end.
    assert run.counts.transfers_to_host <= 4 + 1
    assert run.losses[-1] < run.losses[0]


def test_operations_execute_at_once_before_and_after_training() -> None:
    trainer = Trainer(Classifier(), arguments(max_steps=2), train_dataset=vector_samples(8))
    assert _executes_at_once()
    trainer.train()
    assert _executes_at_once()


def _executes_at_once() -> bool:
    tensor = torch.ones(3).to(DEVICE)
    with xla_adapters.count() as counters:
        tensor = tensor + 1
    return counters.eager_ops == 1


def test_accumulation_per_micro_batch() -> None:
    args = {"gradient_accumulation_steps": 3, "max_steps": 3}
    run = assert_parity(gpt2, token_samples(36), args=args)
    # Three graphs: without gradients, with gradients, with the update.
    run.assert_one_graph(3, graphs=3, executions_per_step=3)


def test_accumulation_unrolled() -> None:
    args = {"gradient_accumulation_steps": 3, "max_steps": 3}
    run = assert_parity(gpt2, token_samples(36), args=args, xla={"accumulation": "unrolled"})
    run.assert_one_graph(3)


@pytest.mark.parametrize("accumulation", ["per_micro_batch", "unrolled"])
def test_last_accumulation_of_an_epoch_is_partial(accumulation: str) -> None:
    # 5 batches per epoch, 2 per update: the third update of an epoch has one batch.
    args = {"gradient_accumulation_steps": 2, "max_steps": -1, "num_train_epochs": 2}
    run = assert_parity(Classifier, vector_samples(20), args=args, xla={"accumulation": accumulation})
    executions = [step.executions for step in run.steps]
    assert executions == ([2, 2, 1] * 2 if accumulation == "per_micro_batch" else [1] * 6)
    # Graphs of a micro batch: accumulation, update after one, update alone.
    assert run.counts.compiles == (3 if accumulation == "per_micro_batch" else 2), run.explain()


@pytest.mark.parametrize("accumulation", ["per_micro_batch", "unrolled"])
def test_epoch_of_unknown_length_ends_in_an_accumulation(accumulation: str) -> None:
    # 3 batches per epoch, 2 per update.
    args = {"gradient_accumulation_steps": 2, "max_steps": 4}
    run = assert_parity(Classifier, Stream(vector_samples(12)), args=args, xla={"accumulation": accumulation})
    assert len(run.losses) == 4


def test_clipping_bites() -> None:
    run = assert_parity(gpt2, token_samples(16), args={"max_grad_norm": 0.05})
    run.assert_one_graph(4)
    assert min(run.logged("grad_norm")) > 0.05


def test_no_clipping_logs_no_norm_and_costs_nothing() -> None:
    run = assert_parity(gpt2, token_samples(16), args={"max_grad_norm": 0.0})
    run.assert_one_graph(4)
    assert run.counts.transfers_to_host <= 4 + 1


def test_label_smoothing() -> None:
    plain = ours(gpt2(), token_samples(16), args=arguments(max_steps=1))
    run = assert_parity(gpt2, token_samples(16), args={"label_smoothing_factor": 0.2})
    run.assert_one_graph(4)
    assert abs(run.losses[0] - plain.losses[0]) > 1e-4


def test_bf16_computes_in_bfloat16_and_keeps_float32_parameters() -> None:
    before = {name: value for name, value in os.environ.items() if "BF16" in name}
    seen: list[torch.dtype] = []
    model = gpt2()
    model.transformer.h[0].mlp.c_fc.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    run = ours(model, token_samples(16), args=arguments(bf16=True))
    run.assert_one_graph(4)
    assert set(seen) == {torch.bfloat16}
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
    state = next(iter(run.trainer.optimizer.state.values()))
    assert state["exp_avg"].dtype == torch.float32
    assert {name: value for name, value in os.environ.items() if "BF16" in name} == before
    # bfloat16 has 8 bits of mantissa: a loss of about 4 is known to 1/64.
    assert_parity(gpt2, token_samples(16), args={"bf16": True}, tolerance=2e-2)


@pytest.mark.parametrize("name", ["gradient_checkpointing", "activation_checkpointing"])
def test_checkpointing_computes_twice_and_the_same(name: str) -> None:
    """The recomputation draws the same dropout masks, so that the losses agree with a run without checkpointing."""
    plain = ours(gpt2(dropout=0.3, layers=2), token_samples(16), args=arguments(seed=7))
    calls: list[int] = []
    model = gpt2(dropout=0.3, layers=2)
    model.transformer.h[0].mlp.register_forward_pre_hook(lambda *args: calls.append(1))
    run = ours(model, token_samples(16), args=arguments(seed=7, **{name: True}))
    run.assert_one_graph(4)
    assert len(calls) == 2 * 4
    assert_close(run.losses, plain.losses)
    assert_close(run.logged("grad_norm"), plain.logged("grad_norm"), 1e-4)


def test_checkpointing_parity_with_cpu() -> None:
    run = assert_parity(lambda: gpt2(layers=2), token_samples(16), args={"gradient_checkpointing": True})
    run.assert_one_graph(4)


def test_neftune_adds_noise_that_repeats_and_goes_away() -> None:
    plain = ours(gpt2(), token_samples(16), args=arguments(max_steps=3))
    noisy, again = (
        ours(gpt2(), token_samples(16), args=arguments(max_steps=3, neftune_noise_alpha=5.0)) for _ in range(2)
    )
    noisy.assert_one_graph(3)
    assert noisy.losses == again.losses
    assert noisy.losses != plain.losses
    # alpha 5 on 8 tokens of width 16: noise of at most 5 / sqrt(128) on each embedding.
    assert_close(noisy.losses, plain.losses, 0.5)
    assert not noisy.trainer.model.get_input_embeddings()._forward_hooks
