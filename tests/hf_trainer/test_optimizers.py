"""Optimizers and schedules, by name and of the user: one graph, and the numbers of the plain CPU."""

from __future__ import annotations

import importlib.util
import warnings
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import SchedulerType
from transformers.training_args import OptimizerNames

import hf_trainer
from tests.device import DEVICE
from tests.hf_trainer.scenarios import (
    Classifier,
    arguments,
    assert_close,
    assert_parity,
    gpt2,
    ours,
    reference,
    steps_of,
    token_samples,
    vector_samples,
    without_xla,
)
from xla_adapters import EagerOptimizerWarning
from xla_adapters.errors import UnsupportedOptionError

pytestmark = pytest.mark.isolated


_SCHEDULES: dict[str, dict[str, Any]] = {
    "linear": {},
    "linear with warm-up": {"warmup_steps": 2},
    "constant": {"lr_scheduler_type": "constant"},
    "constant at 1": {"lr_scheduler_type": "constant", "learning_rate": 1.0},
    "constant_with_warmup": {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 2},
    "warm-up to 1": {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 2, "learning_rate": 1.0},
    "cosine": {"lr_scheduler_type": "cosine"},
    "cosine_with_restarts": {
        "lr_scheduler_type": "cosine_with_restarts",
        "lr_scheduler_kwargs": {"num_cycles": 2},
        "warmup_steps": 1,
    },
    "polynomial": {"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"power": 2.0, "lr_end": 0.0}},
    "inverse_sqrt": {"lr_scheduler_type": "inverse_sqrt", "warmup_steps": 2},
    "cosine_with_min_lr": {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 1e-4}},
    "cosine_warmup_with_min_lr": {
        "lr_scheduler_type": "cosine_warmup_with_min_lr",
        "lr_scheduler_kwargs": {"min_lr": 1e-4},
        "warmup_steps": 2,
    },
    "warmup_stable_decay": {
        "lr_scheduler_type": "warmup_stable_decay",
        "lr_scheduler_kwargs": {"num_decay_steps": 2},
        "warmup_steps": 2,
    },
}
_NEEDS_EVALUATION = {"reduce_lr_on_plateau", "greedy"}


@pytest.mark.parametrize("optimizer", ["adamw_torch", "sgd"])
def test_schedules_are_one_graph(optimizer: str) -> None:
    """Also with values of exactly 0 and 1, which torch_xla by default makes constants of the graph."""
    data = vector_samples(24)
    for name, options in _SCHEDULES.items():
        args = {"max_steps": 6, "optim": optimizer, **options}
        run = assert_parity(Classifier, data, args=args)
        rates = run.logged("learning_rate")
        assert run.counts.compiles <= 1, f"{name}: {run.explain()}"
        assert [step.executions for step in run.steps] == [1] * 6, name
        assert all(step.eager_ops == step.transfers_to_host == 0 for step in run.steps), name
        if "warmup_steps" in options and "min_lr" not in name:
            assert rates[0] == 0.0, name
        if options.get("learning_rate") == 1.0:
            assert 1.0 in rates, name


def test_no_schedule_is_forgotten() -> None:
    tested = {options.get("lr_scheduler_type", "linear") for options in _SCHEDULES.values()}
    assert {kind.value for kind in SchedulerType} == tested | _NEEDS_EVALUATION


@pytest.mark.parametrize("schedule", sorted(_NEEDS_EVALUATION))
def test_schedule_that_follows_the_evaluation(schedule: str) -> None:
    options = {"patience": 0} if schedule == "reduce_lr_on_plateau" else {"patience": 0, "smooth": False}
    args = {
        "lr_scheduler_type": schedule,
        "lr_scheduler_kwargs": options,
        "eval_strategy": "steps",
        "eval_steps": 1,
        "max_steps": 6,
        "learning_rate": 2.0,
        "optim": "sgd",
        "metric_for_best_model": "eval_loss",
    }
    run = assert_parity(Classifier, vector_samples(24), args=args, eval_dataset=vector_samples(8, seed=1))
    assert len(set(run.logged("learning_rate"))) > 1
    assert steps_of(run.trainer).train.graphs == 1
    assert [step.executions for step in run.steps] == [1] * 6


_OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw_torch": {},
    "adamw_torch_fused": {},
    "sgd": {},
    "sgd momentum": {"optim": "sgd", "optim_args": "momentum=0.9"},
    "adagrad": {},
    "rmsprop": {},
    "rmsprop momentum": {"optim": "rmsprop", "optim_args": "momentum=0.9, centered=True"},
    "adamw amsgrad": {"optim": "adamw_torch", "optim_args": "amsgrad=True"},
}


def test_optimizers_by_name_are_one_graph() -> None:
    data = vector_samples(16)
    with warnings.catch_warnings():
        warnings.simplefilter("error", EagerOptimizerWarning)
        for name, options in _OPTIMIZERS.items():
            args = {"optim": name, "max_grad_norm": 1.0, **options}
            run = assert_parity(Classifier, data, args=args)
            assert run.counts.compiles <= 1, f"{name}: {run.explain()}"
            assert [step.executions for step in run.steps] == [1] * 4, name
            assert all(step.eager_ops == step.transfers_to_host == 0 for step in run.steps), name


def test_adafactor() -> None:
    """Its first update is a graph of its own, all later ones are one graph.

    In the first update the decay is exactly 0, and 1 - decay equals the clipping threshold of 1.0:
    torch_xla uploads equal numbers once, so this graph has fewer inputs than the others.
    """
    args = {"optim": "adafactor", "max_steps": 6}
    run = assert_parity(Classifier, vector_samples(24), args=args)
    run.assert_one_graph(6, graphs=2)
    assert [step.compiles for step in run.steps] == [1, 1, 0, 0, 0, 0]
    # Matrices have a factored second moment, vectors do not. Embeddings are large.
    assert_parity(gpt2, token_samples(16), args={"optim": "adafactor", "max_steps": 3})


def _adam_with_groups(model: nn.Module) -> torch.optim.Optimizer:
    named = list(model.named_parameters())
    return torch.optim.NAdam(
        [
            {"params": [value for name, value in named if name.endswith("weight")], "lr": 1e-2},
            {"params": [value for name, value in named if name.endswith("bias")], "lr": 1.0},
        ]
    )


def test_optimizer_of_the_user() -> None:
    data = vector_samples(16)
    cpu_model = Classifier()
    expected = reference(cpu_model, data, optimizers=(_adam_with_groups(cpu_model), None))
    model = Classifier().to(DEVICE)
    run = ours(model, data, optimizers=(_adam_with_groups(model), None))
    run.assert_one_graph(4)
    assert_close(run.losses, expected.losses)


def test_scheduler_of_the_user() -> None:
    def schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.07, total_steps=10)

    data = vector_samples(16)
    cpu_model = Classifier()
    optimizer = torch.optim.AdamW(cpu_model.parameters())
    expected = reference(cpu_model, data, optimizers=(optimizer, schedule(optimizer)))
    model = Classifier().to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters())
    run = ours(model, data, optimizers=(optimizer, schedule(optimizer)))
    run.assert_one_graph(4)
    assert_close(run.losses, expected.losses)
    assert_close(run.logged("learning_rate"), expected.logged("learning_rate"), 0.0)


def test_optimizer_by_class() -> None:
    run = assert_parity(
        Classifier, vector_samples(16), optimizer_cls_and_kwargs=(torch.optim.Adamax, {"lr": 1e-2, "weight_decay": 0.1})
    )
    run.assert_one_graph(4)


class StepsOnce(torch.optim.LBFGS):
    """LBFGS for a loop without closures: one direction per step."""

    def step(self, closure: Any = None) -> Any:
        grads = [parameter.grad for group in self.param_groups for parameter in group["params"]]
        loss = torch.stack([grad.square().sum() for grad in grads]).sum()
        saved = [grad.clone() for grad in grads]

        def known() -> torch.Tensor:
            for parameter, grad in zip(self.param_groups[0]["params"], saved, strict=True):
                parameter.grad = grad
            return loss

        return super().step(known)


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        (torch.optim.Adafactor, {"lr": 1e-2}),
        (StepsOnce, {"lr": 1e-2, "max_iter": 1}),
        (transformers.optimization.Adafactor, {"lr": 1e-2, "scale_parameter": True, "relative_step": False}),
    ],
)
def test_optimizers_that_read_run_eagerly_and_say_so_once(optimizer: Any, options: dict[str, Any]) -> None:
    # LBFGS accepts one parameter group only.
    class OneGroup(hf_trainer.Trainer):
        def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
            self.optimizer = optimizer(self.model.parameters(), **options)
            return self.optimizer

    class OneGroupOnCPU(transformers.Trainer):
        create_optimizer = OneGroup.create_optimizer

    data, args = vector_samples(16), {"max_grad_norm": 0.0}
    with without_xla():
        cpu = OneGroupOnCPU(model=Classifier(), args=arguments(use_cpu=True, **args), train_dataset=data)
        cpu.train()
    expected = [entry["loss"] for entry in cpu.state.log_history if "loss" in entry]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = ours(Classifier(), data, args=arguments(**args), trainer_class=OneGroup)
    told = [str(warning.message) for warning in caught if warning.category is EagerOptimizerWarning]
    assert len(told) == 1
    assert f"{optimizer.__name__} runs eagerly" in told[0]
    assert_close(run.losses, expected)
    # Forward and backward are one graph, executed before the optimizer reads.
    assert all(step.executions >= 1 and step.eager_ops > 0 for step in run.steps)


def test_eager_optimizer_through_cls_and_kwargs() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = assert_parity(
            Classifier, vector_samples(16), optimizer_cls_and_kwargs=(torch.optim.Adafactor, {"lr": 1e-2})
        )
    told = [warning for warning in caught if warning.category is EagerOptimizerWarning]
    assert len(told) == 1
    # The forward and backward: one graph, once per step.
    assert steps_of(run.trainer).train.graphs <= 1
    assert len(run.losses) == 4


# ---- every name that transformers knows -------------------------------------------------------------


# How many of 8 steps are replayed, with the reason where more than two are traced.
_REPLAYED = {
    "adamw_torch": (6, ""),
    "adamw_torch_fused": (6, ""),
    "sgd": (6, ""),
    "adagrad": (6, ""),
    "rmsprop": (6, ""),
}
# Why optimizers that are unknown, run eagerly, or update inside of backward are not replayed.
_OTHERWISE = {
    **dict.fromkeys(("adamw_torch_xla", "adafactor"), (0, "none of the optimizers whose updates are known")),
    **dict.fromkeys(
        ("schedule_free_adamw", "schedule_free_sgd", "schedule_free_radam"),
        (0, "none of the optimizers whose updates are known"),
    ),
    "grokadamw": (0, "was executed before its end"),
    "stable_adamw": (0, "was executed before its end"),
    "lomo": (0, "has a hook"),
}
# By the package that transformers reports as missing.
_MISSING = {
    "torch_npu": ["adamw_torch_npu_fused"],
    "torchdistx": ["adamw_anyprecision"],
    "torchao": ["adamw_torch_4bit", "adamw_torch_8bit"],
    "bitsandbytes": [
        *("adamw_bnb_8bit", "adamw_8bit", "ademamix", "ademamix_8bit", "lion_8bit", "lion_32bit"),
        *("paged_adamw_32bit", "paged_adamw_8bit", "paged_ademamix_32bit", "paged_ademamix_8bit"),
        *("paged_lion_32bit", "paged_lion_8bit", "rmsprop_bnb", "rmsprop_bnb_8bit", "rmsprop_bnb_32bit"),
    ],
    "galore_torch": [
        *("galore_adamw", "galore_adamw_8bit", "galore_adafactor"),
        *("galore_adamw_layerwise", "galore_adamw_8bit_layerwise", "galore_adafactor_layerwise"),
    ],
    "apollo_torch": ["apollo_adamw", "apollo_adamw_layerwise"],
}
# Installed, but they cannot work on XLA.
_REFUSED = {"adalomo": "AdaLomo of lomo_optim .* it asks CUDA"}


def test_none_is_forgotten() -> None:
    missing = [name for names in _MISSING.values() for name in names]
    assert sorted([*_REPLAYED, *_OTHERWISE, *_REFUSED, *missing]) == sorted(member.value for member in OptimizerNames)


def _train(name: str, replay: bool | str) -> Any:
    args = arguments(optim=name, max_steps=8)
    return ours(Classifier(), vector_samples(32), args=args, step_replay=replay)


def test_replayed_bit_for_bit_and_as_on_the_cpu() -> None:
    for name, (replays, reason) in {**_REPLAYED, **_OTHERWISE}.items():
        replayed, retraced = _train(name, "auto"), _train(name, False)
        program = steps_of(replayed.trainer).train
        assert program.replays == replays, (name, program.replay_reasons)
        if name in _REPLAYED:
            assert [reason in found for found in program.replay_reasons] == ([True] if reason else []), name
        else:
            assert any(reason in found for found in program.replay_reasons), (name, program.replay_reasons)
        assert replayed.losses == retraced.losses, name
        weights = [run.trainer.model.state_dict() for run in (replayed, retraced)]
        for key in weights[0]:
            assert torch.equal(weights[0][key].cpu(), weights[1][key].cpu()), (name, key)
        # The CPU has no fused and syncfree kernels; both are AdamW.
        stock = "adamw_torch" if name.startswith("adamw") else name
        if name == "stable_adamw":
            # transformers' own run asks triton for a GPU, or starts it.
            continue
        expected = reference(Classifier(), vector_samples(32), args={"optim": stock, "max_steps": 8})
        assert_close(replayed.losses, expected.losses)


def test_what_is_not_installed_is_said() -> None:
    for package, names in _MISSING.items():
        # If one is added to the environment, add it to the optimizers that are trained above.
        assert importlib.util.find_spec(package) is None, f"{package} is installed now"
        for name in names:
            with pytest.raises((ImportError, ValueError), match=package):
                _train(name, "auto")


def test_what_is_not_for_xla_is_refused() -> None:
    for name, message in _REFUSED.items():
        with pytest.raises(UnsupportedOptionError, match=message):
            _train(name, "auto")


def test_optimizers_of_packages_that_are_not_for_xla_are_refused_where_they_are_handed_in() -> None:
    class AdamW8bit(torch.optim.SGD):
        __module__ = "bitsandbytes.optim.adamw"

    class Own(AdamW8bit):
        pass

    model = Classifier()
    with pytest.raises(UnsupportedOptionError, match="AdamW8bit of bitsandbytes"):
        ours(model, vector_samples(8), args=arguments(max_steps=1), optimizers=(Own(model.parameters(), lr=0.1), None))
