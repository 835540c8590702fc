"""Every optimizer of `TrainingArguments(optim=...)`: replayed bit for bit, or a clear error."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from transformers.training_args import OptimizerNames

from tests.hf_trainer.scenarios import Classifier, arguments, assert_close, ours, reference, steps_of, vector_samples
from tests.isolation import isolated
from xla_adapters.errors import UnsupportedOptionError

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


@isolated
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


@isolated
def test_what_is_not_installed_is_said() -> None:
    for package, names in _MISSING.items():
        # If one is added to the environment, add it to the optimizers that are trained above.
        assert importlib.util.find_spec(package) is None, f"{package} is installed now"
        for name in names:
            with pytest.raises((ImportError, ValueError), match=package):
                _train(name, "auto")


@isolated
def test_what_is_not_for_xla_is_refused() -> None:
    for name, message in _REFUSED.items():
        with pytest.raises(UnsupportedOptionError, match=message):
            _train(name, "auto")


@isolated
def test_optimizers_of_packages_that_are_not_for_xla_are_refused_where_they_are_handed_in() -> None:
    class AdamW8bit(torch.optim.SGD):
        __module__ = "bitsandbytes.optim.adamw"

    class Own(AdamW8bit):
        pass

    model = Classifier()
    with pytest.raises(UnsupportedOptionError, match="AdamW8bit of bitsandbytes"):
        ours(model, vector_samples(8), args=arguments(max_steps=1), optimizers=(Own(model.parameters(), lr=0.1), None))
