"""A step's own code that is wrapped or replaced, in properties, loops, containers, classes of its own."""

from __future__ import annotations

import functools
import gc
import operator
import weakref
from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from tests.device import DEVICE
from tests.replay.replay_cases import assert_followed
from tests.support import update
from xla_adapters import CompiledStep

pytestmark = pytest.mark.isolated

# ---- what changes takes effect ------------------------------------------------------------------------

_REFERENCE = torch.zeros(3)


class _Settings:
    factor = 1.0

    @property
    def scale(self) -> float:
        return 1.0


class _Number(float):
    scale = 1.0


class _Items(dict[str, Any]):
    scale = 1.0


class _Buffered(nn.Module):
    def __init__(self, value: torch.Tensor | None) -> None:
        super().__init__()
        self.register_buffer("value", value)
        self.weight = nn.Parameter(torch.ones(3, 4))

    def predict(self, inputs: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(inputs, self.weight).sum().detach()


def _tripled(loss: torch.Tensor) -> torch.Tensor:
    return loss * 3.0


def _code_replaced(model: nn.Module) -> Any:
    def scaled(loss: torch.Tensor) -> torch.Tensor:
        return loss * 1.0

    step = lambda inputs: scaled(model(inputs).sum().detach())  # noqa: E731
    return step, lambda: setattr(scaled, "__code__", _tripled.__code__)


def _shape_of_a_global_tensor(model: nn.Module) -> Any:
    def change() -> None:
        global _REFERENCE
        _REFERENCE = torch.zeros(5, device=DEVICE)

    global _REFERENCE
    _REFERENCE = torch.zeros(3, device=DEVICE)
    return (lambda inputs: model(inputs).sum().detach() * _REFERENCE.shape[0]), change


def _attribute_of_a_number(model: nn.Module) -> Any:
    number = _Number(2.0)
    return (lambda inputs: model(inputs).sum().detach() * number.scale), lambda: setattr(number, "scale", 3.0)


def _attribute_of_a_dict(model: nn.Module) -> Any:
    items = _Items()
    items.scale = 2.0
    return (lambda inputs: model(inputs).sum().detach() * items.scale), lambda: setattr(items, "scale", 3.0)


def _list_with_a_nan(model: nn.Module) -> Any:
    numbers = [1.0, float("nan")]
    step = lambda inputs: model(inputs).sum().detach() * numbers[0]  # noqa: E731
    return step, lambda: operator.setitem(numbers, 0, 3.0)  # type: ignore[call-overload]


def _parameter_of_a_model_in_a_list(model: nn.Module) -> Any:
    models = [model]
    step = lambda inputs: (inputs @ models[0].weight.T).sum().detach()  # noqa: E731
    return step, lambda: setattr(model, "weight", nn.Parameter(torch.full((3, 4), 2.0, device=DEVICE)))


def _parameter_of_a_bound_method(model: nn.Module) -> Any:
    own = _Buffered(None).to(DEVICE)
    return own.predict, lambda: setattr(own, "weight", nn.Parameter(torch.full((3, 4), 2.0, device=DEVICE)))


def _buffer_that_comes(model: nn.Module) -> Any:
    own = [_Buffered(None).to(DEVICE)]

    def step(inputs: torch.Tensor) -> torch.Tensor:
        loss = model(inputs).sum().detach()
        return loss if own[0].value is None else loss * 2

    return step, lambda: setattr(own[0], "value", torch.ones(5, device=DEVICE))


def _switch(model: nn.Module) -> Any:
    """What is switched off is not looked at: it may do anything."""
    settings = SimpleNamespace(shout=False)

    def step(inputs: torch.Tensor) -> torch.Tensor:
        loss = model(inputs).sum().detach()
        if not settings.shout:
            return loss
        return loss * 3

    return step, lambda: setattr(settings, "shout", True)


_FOLLOWED = [
    _code_replaced,
    _shape_of_a_global_tensor,
    _attribute_of_a_number,
    _attribute_of_a_dict,
    _list_with_a_nan,
    _parameter_of_a_model_in_a_list,
    _parameter_of_a_bound_method,
    _buffer_that_comes,
    _switch,
]


def test_what_changes_is_followed() -> None:
    assert_followed(_FOLLOWED)


def test_attributes_that_nobody_reads_may_become_anything() -> None:
    """They count, since a library's code may read them; what cannot be compared is traced."""
    model: Any = nn.Linear(4, 3).to(DEVICE)
    model.extra = 1.0
    step = CompiledStep(lambda inputs: model(inputs).sum().detach())
    for value in (1.0, torch.ones(2, device=DEVICE), torch.ones((), device=DEVICE), np.ones(3)):
        model.extra = value
        for _ in range(4):
            step(torch.ones(2, 4))
    assert step.replays == 6
    assert "Linear.extra is a ndarray, which cannot be compared" in step.reasons


# ---- what has effects is traced --------------------------------------------------------------------------

_log: list[int] = []


def _noting(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*arguments: Any, **options: Any) -> Any:
        _log.append(1)
        return function(*arguments, **options)

    return wrapper


def _noting_by_default(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(inputs: Any, note: Callable[[int], None] = _log.append) -> Any:
        note(1)
        return function(inputs)

    return wrapper


class _Kind(str, Enum):
    ONE = "one"

    def note(self) -> None:
        _log.append(1)


class _Shifted(list[int]):
    def __lshift__(self, item: int) -> None:
        _log.append(item)


class _Shown(nn.Module):
    def __repr__(self) -> str:
        _log.append(1)
        return "shown"


class _Observed:
    value = 1.0

    def __getattribute__(self, name: str) -> Any:
        _log.append(1)
        return object.__getattribute__(self, name)


class _Counting(torch.optim.SGD):
    def zero_grad(self, set_to_none: bool = True) -> None:
        _log.append(1)
        super().zero_grad(set_to_none)


def _made() -> int:
    _log.append(1)
    return 1


@dataclass
class _Record:
    value: int = field(default_factory=_made)


_mse = _noting(nn.functional.mse_loss)
_twice = _noting_by_default(lambda inputs: inputs * 2)
_shifted, _shown, _observed, _options = _Shifted(), _Shown(), _Observed(), UserDict[str, int]()


def _wrapped(inputs: Any) -> Any:
    return _mse(inputs, inputs * 2)


def _defaulted(inputs: Any) -> Any:
    return _twice(inputs)


def _enumerated(inputs: Any) -> Any:
    _Kind.ONE.note()
    return inputs


def _shifts(inputs: Any) -> Any:
    _shifted << 1
    return inputs


def _shows(inputs: Any) -> Any:
    return inputs * len(str(_shown))


def _observes(inputs: Any) -> Any:
    return inputs * _observed.value


def _records(inputs: Any) -> Any:
    return inputs * _Record().value


def _calls_by_name(inputs: Any) -> Any:
    operator.methodcaller("append", 1)(_log)
    return inputs


def _sets_an_item(inputs: Any) -> Any:
    operator.iadd(_log, [1])
    return inputs


def _passes_on_in_a_loop(inputs: Any) -> Any:
    first: list[int] = []
    second: list[int] = []
    third: list[int] = []
    for _ in range(5):
        first.append(1)
        first = second
        second = third
        third = _log
    return inputs


def _passes_on_to_itself(inputs: Any) -> Any:
    def note(found: list[int], rounds: int) -> None:
        if rounds:
            note(_log, rounds - 1)
        else:
            found.append(1)

    note([], 1)
    return inputs


def _catches(inputs: Any) -> Any:
    _ = _log
    try:
        inputs = inputs * 1
    except ValueError:
        inputs = inputs * 2
    _.append(1)
    return inputs


_EFFECTS = [
    (_wrapped, 1),
    (_defaulted, 1),
    (_enumerated, 1),
    (_shifts, 1),
    (_shows, 1),
    (_observes, 1),
    (_records, 1),
    (_calls_by_name, 1),
    (_sets_an_item, 1),
    (_passes_on_in_a_loop, 2),
    (_passes_on_to_itself, 1),
    (_catches, 1),
]


def test_effects_are_not_left_out() -> None:
    for function, times in _EFFECTS:
        _log.clear()
        step = CompiledStep(function)
        for _ in range(6):
            step(torch.ones(2, 4))
        assert len(_log) >= 6 * times, function.__name__
        assert step.replays == 0, function.__name__
        assert any(f"{__file__}:" in reason for reason in step.reasons), (function.__name__, step.reasons)


def test_an_optimizer_that_counts_how_often_gradients_are_dropped() -> None:
    model = nn.Linear(4, 3).to(DEVICE)
    optimizer = _Counting(model.parameters(), lr=0.1)

    def step(inputs: torch.Tensor) -> torch.Tensor:
        return update(model(inputs).square().mean(), optimizer)

    _log.clear()
    compiled = CompiledStep(step)
    for _ in range(6):
        compiled(torch.ones(2, 4))
    assert len(_log) == 6, compiled.reasons


def test_arguments_that_the_first_call_left_out() -> None:
    def step(inputs: torch.Tensor, found: dict[str, Any] | None = None) -> torch.Tensor:
        if found is not None:
            found["seen"] = 1
        return inputs.sum()

    compiled = CompiledStep(step)
    compiled(torch.ones(2, 4))
    for _ in range(6):
        found: dict[str, Any] = {"it": torch.ones(2, device=DEVICE)}
        compiled(torch.ones(2, 4, device=DEVICE), found)
        assert "seen" in found


def test_code_that_is_traced_holds_on_to_nothing() -> None:
    kept: list[torch.Tensor] = []

    def step(inputs: torch.Tensor) -> torch.Tensor:
        doubled = inputs * 2
        kept.append(doubled)
        return doubled.sum()

    compiled = CompiledStep(step)
    for _ in range(12):
        compiled(torch.ones(2, 4))
    found = [weakref.ref(tensor) for tensor in kept]
    kept.clear()
    gc.collect()
    assert not any(reference() is not None for reference in found)
    (reason, *others) = compiled.reasons
    assert "append" in reason
    assert not any("steps in a row" in other for other in others)


class _Operators(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        _log.append(1)
        return func(*args, **(kwargs or {}))


def test_modes_that_see_each_operator() -> None:
    _log.clear()
    step = CompiledStep(lambda inputs: (inputs * 2).sum())
    with _Operators():
        for _ in range(6):
            before = len(_log)
            step(torch.ones(2, 4))
            assert len(_log) > before
    assert step.replays == 0
    with torch.device("cpu"):
        for _ in range(6):
            step(torch.ones(2, 4))
    assert step.replays > 0, step.reasons
