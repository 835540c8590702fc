"""What replays of TRL's steps rely on: `hf_trainer/replay.py` was written for the code that is installed."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import textwrap
from typing import Any

import pytest

from hf_trainer.replay import READ_TRAINERS, SCORES, TRL_METHODS
from xla_adapters.replay.safety.trusted import READ_VERSIONS

trl = pytest.importorskip("trl")


def _trainers() -> list[Any]:
    modules = [importlib.import_module(name) for name in READ_TRAINERS]
    return [
        cls
        for module in modules
        for cls in vars(module).values()
        if inspect.isclass(cls) and cls.__module__ == module.__name__ and hasattr(cls, "compute_loss")
    ]


def test_the_version_was_read() -> None:
    assert trl.__version__.startswith(READ_VERSIONS["trl"])
    assert {cls.__name__ for cls in _trainers()} == {
        *("_BaseTrainer", "SFTTrainer", "DPOTrainer", "RewardTrainer", "KTOTrainer", "GRPOTrainer")
    }


_OF_THE_STEP = ("inputs[", "kwargs[", "model_kwargs[", "KL_model_kwargs[", "model_inputs[", "labels[")
# What GRPO changes with `use_adaptive_entropy`, which is not replayed.
_ADAPTIVE = ("self.entropy_coef", "self._last_world_entropy", "self._entropy_window_stats")
# What it does around the step, also to one that is replayed.
_AROUND_GRPO = (
    *("time", "perf_counter", "super", "training_step", "_step", "_current_train_step_time"),
    *("current_gradient_accumulation_steps", "_metrics", "append"),
)


@pytest.mark.parametrize("cls", [cls for cls in _trainers() if cls.__name__ != "_BaseTrainer"])
def test_a_step_appends_numbers_and_nothing_else(cls: Any) -> None:
    generates = hasattr(cls, SCORES)
    around = _AROUND_GRPO if generates else ("maybe_activation_offload_context", "super", "training_step")
    assert set(vars(cls)["training_step"].__code__.co_names) == set(around)
    code = "\n".join(textwrap.dedent(inspect.getsource(vars(cls)[name])) for name in TRL_METHODS if name in vars(cls))
    nodes = list(ast.walk(ast.parse(code)))
    targets = [target for node in nodes if isinstance(node, ast.Assign) for target in node.targets]
    targets += [node.target for node in nodes if isinstance(node, ast.AugAssign)]
    # Dictionaries and tensors that the trainer or the method has made for the step.
    changed = {ast.unparse(target) for target in targets if not isinstance(target, (ast.Name, ast.Tuple))}
    own = {name for name in changed if not name.startswith(_OF_THE_STEP)}
    assert own <= {"self._total_train_tokens", "self._metrics[mode]['num_tokens']", *(_ADAPTIVE if generates else ())}
    calls = [node.value for node in nodes if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)]
    called = {ast.unparse(call.func) for call in calls}
    assert {name for name in called if not re.fullmatch(r"self\._metrics\[mode\]\['[a-z_/]+'\]\.append", name)} <= {
        *("warnings.warn", "all_aux_losses.append", "all_entropies.append", "all_logps.append")
    }
    # Each method that it calls on the trainer is one that is looked at.
    methods = {name for name, _ in inspect.getmembers(cls, inspect.isfunction) if f"self.{name}(" in code}
    assert methods <= {*TRL_METHODS, "compute_loss_func"}
    made = inspect.getsource(cls.__init__)
    assert 'self._metrics = {"train": defaultdict(list), "eval": defaultdict(list)}' in made
    assert "self._total_train_tokens = 0" in made
    assert generates or "self.maybe_activation_offload_context = contextlib.nullcontext()" in made


def test_a_reference_is_computed_without_checkpointing() -> None:
    """`disable_gradient_checkpointing`, which is replaced, gets a model and one more argument."""
    function = importlib.import_module("trl.models.utils").disable_gradient_checkpointing
    assert list(inspect.signature(function).parameters) == ["model", "gradient_checkpointing_kwargs"]
    assert importlib.import_module("trl.trainer.dpo_trainer").disable_gradient_checkpointing is function
