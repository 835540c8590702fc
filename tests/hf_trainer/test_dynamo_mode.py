"""`xla_mode="eager+dynamo"` takes every option of compiled steps, and trains as `"eager+compile"` does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.hf_trainer.scenarios import Run, arguments, assert_close, gpt2, ours, reference, steps_of, token_samples
from tests.isolation import isolated
from xla_adapters import GraphLimitError

_STEPS = 12


def _run(mode: str, *, args: dict[str, Any] | None = None, **options: Any) -> Run:
    made = arguments(max_steps=_STEPS, logging_steps=6, **(args or {}))
    return ours(gpt2(dropout=0.2), token_samples(64), args=made, xla_mode=mode, **options)


@isolated
@pytest.mark.parametrize(
    ("options", "args"),
    [
        ({}, {}),
        ({"step_replay": True}, {}),
        ({"max_graphs": 1, "on_recompile": "error"}, {}),
        ({"accumulation": "unrolled"}, {"gradient_accumulation_steps": 2}),
    ],
    ids=lambda options: ",".join(options) if isinstance(options, dict) else None,
)
def test_the_same_run_with_each_option(options: dict[str, Any], args: dict[str, Any]) -> None:
    runs = compiled, dynamo = [_run(mode, args=args, **options) for mode in ("eager+compile", "eager+dynamo")]
    for name in ("loss", "grad_norm"):
        assert compiled.logged(name) == dynamo.logged(name), name
    before, after = compiled.parameters(), dynamo.parameters()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    replays = [steps_of(run.trainer).train.replays for run in runs]
    assert replays[0] == replays[1]
    assert (replays[0] > 0) == (options.get("accumulation") is None)
    for run in runs:
        assert [step.executions for step in run.steps] == [1] * _STEPS, run.explain()
    # It is the same graph, which the first run has compiled.
    assert [run.counts.compiles for run in runs] == [1, 0]


@isolated
def test_losses_of_the_plain_cpu() -> None:
    args = {"max_steps": 6}
    run = ours(gpt2(), token_samples(24), args=arguments(**args), xla_mode="eager+dynamo", step_replay=True)
    run.assert_one_graph(6)
    assert_close(run.losses, reference(gpt2(), token_samples(24), args=args).losses)


@isolated
@pytest.mark.parametrize("option", [{"max_graphs": 1}, {"on_recompile": "error"}], ids=["max_graphs", "on_recompile"])
def test_a_second_graph_is_refused(option: dict[str, Any]) -> None:
    # The last batch has two rows.
    args = arguments(max_steps=-1, num_train_epochs=1)
    with pytest.raises(GraphLimitError, match=next(iter(option))):
        ours(gpt2(), token_samples(10), args=args, xla_mode="eager+dynamo", **option)


@isolated
def test_a_model_that_is_called_outside_of_steps() -> None:
    # Dynamo keeps fake tensors of the device; the steps behind the first evaluation are recorded and replayed.
    args: dict[str, Any] = {"max_steps": 6, "eval_strategy": "steps", "eval_steps": 1}
    mode: dict[str, Any] = {"xla_mode": "eager+dynamo", "compile_eval": False}
    held_out = token_samples(8, seed=1)
    for _ in range(2):
        run = ours(gpt2(), token_samples(24), args=arguments(**args), **mode, eval_dataset=held_out)
        # A number of the step may be one that a graph of dynamo holds, too: then another call is traced.
        assert steps_of(run.trainer).train.replays >= 2, steps_of(run.trainer).train.replay_reasons
        assert [step.executions for step in run.steps] == [1] * 6
        # Operation by operation an evaluation alone takes more.
        assert run.counts.executions < 100
        expected = reference(gpt2(), token_samples(24), args=args, eval_dataset=held_out)
        for name in ("loss", "eval_loss"):
            assert_close(run.logged(name), expected.logged(name))
