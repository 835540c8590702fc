"""Code that is replaced while steps are replayed, in classes, on objects and in libraries: it runs from then on."""

from __future__ import annotations

import builtins
import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from tests.device import DEVICE
from tests.isolation import isolated, run_in_child
from xla_adapters import CompiledStep, XLAConfig

_WIDTH, _CLASSES, _CHANGED_AT, _STEPS = 8, 4, 8, 13


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(_WIDTH, _CLASSES)
        self.scale = 1.0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.linear(inputs) * self.scale


class _Root(_Net):
    def head(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.linear(inputs)


class _Middle(_Root):
    pass


class _Leaf(_Middle):
    def head(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().head(inputs)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(inputs)


class _OwnLinear(nn.Linear):
    pass


class _WithOwnLinear(_Net):
    def __init__(self) -> None:
        super().__init__()
        self.linear = _OwnLinear(_WIDTH, _CLASSES)


class _Encoder(nn.TransformerEncoderLayer):
    pass


class _WithEncoder(_Net):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = _Encoder(_WIDTH, 2, 8, dropout=0.0, batch_first=True)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.linear(self.encoder(inputs[:, None]).squeeze(1))


class _Helper:
    def __init__(self) -> None:
        self.factor = 1.0


class _WithHelper(_Net):
    def __init__(self) -> None:
        super().__init__()
        self.helper = _Helper()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.linear(inputs) * self.helper.factor


class _UsesMax(_Net):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.linear(inputs) * max(1.0, 0.5)


class _ReadsTensorClass(_Net):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.linear(inputs) * self.linear.weight.gain


class _ReadsSwitch(_Net):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.linear(inputs) * (0.1 if torch.backends.cudnn.deterministic else 1.0)


def _tenth(self: Any, inputs: torch.Tensor, *more: Any, **options: Any) -> torch.Tensor:
    return self.linear(inputs) * 0.1


def _tenth_of_scale(self: Any, name: str) -> Any:
    found = object.__getattribute__(self, name)
    return found * 0.1 if name in ("scale", "factor") else found


def _tenth_of_linear(self: Any, inputs: torch.Tensor) -> torch.Tensor:
    return nn.functional.linear(inputs, self.weight, self.bias) * 0.1


def _tenth_of_block(self: Any, values: torch.Tensor) -> torch.Tensor:
    return values * 0.1


def _tenth_of_backward(tensors: Any, *more: Any, **options: Any) -> None:
    _BACKWARD(tensors * 0.1, *more, **options)


def _other_max(*values: Any, **options: Any) -> Any:
    # torch calls it as well.
    return 0.1 if all(type(value) is float for value in values) else _MAX(*values, **options)


_MAX = max
_BACKWARD = torch.autograd.backward
_CASES: dict[str, tuple[type[_Net], Callable[[_Net], object]]] = {
    "a class gets a __call__": (_Net, lambda net: setattr(_Net, "__call__", _tenth)),
    "a module gets a _call_impl": (_Net, lambda net: setattr(net, "_call_impl", _tenth.__get__(net))),
    "a class gets a __getattribute__": (_Net, lambda net: setattr(_Net, "__getattribute__", _tenth_of_scale)),
    "a class between gets what super finds": (_Leaf, lambda net: setattr(_Middle, "head", _tenth)),
    "a library's module gets a forward": (_WithOwnLinear, lambda net: setattr(_OwnLinear, "forward", _tenth_of_linear)),
    "a library's module gets a part": (_WithEncoder, lambda net: setattr(_Encoder, "_ff_block", _tenth_of_block)),
    "a helper gets a __getattribute__": (
        _WithHelper,
        lambda net: setattr(_Helper, "__getattribute__", _tenth_of_scale),
    ),
    "a builtin is another": (_UsesMax, lambda net: setattr(builtins, "max", _other_max)),
    "an attribute of all tensors": (_ReadsTensorClass, lambda net: setattr(torch.Tensor, "gain", 0.1)),
    "a switch that a module computes": (_ReadsSwitch, lambda net: setattr(torch.backends.cudnn, "deterministic", True)),
    "the engine's entry": (_Net, lambda net: setattr(torch.autograd, "backward", _tenth_of_backward)),
}

# From the beginning: what they read cannot be compared.
_TRACED = ("a switch that a module computes",)


def _losses(replay: bool | str, make: type[_Net], change: Callable[[_Net], object]) -> tuple[list[float], CompiledStep]:
    torch.Tensor.gain = 1.0  # type: ignore[attr-defined]
    torch.manual_seed(0)
    net = make().to(DEVICE)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)

    def update(inputs: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.cross_entropy(net(inputs), classes)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    step = CompiledStep(update, config=XLAConfig(step_replay=replay, replay_verify_every=None))
    losses = []
    for number in range(_STEPS):
        if number == _CHANGED_AT:
            change(net)
        losses.append(step(torch.randn(6, _WIDTH), torch.randint(0, _CLASSES, (6,))))
    return [loss.item() for loss in losses], step


@pytest.mark.parametrize("name", _CASES)
def test_what_is_replaced_runs(name: str) -> None:
    # Each in a process of its own: classes and libraries stay changed.
    traced, replayed, unchanged = (
        run_in_child(functools.partial(_run, replay, name, changed=changed))
        for replay, changed in ((False, True), ("auto", True), (False, False))
    )
    assert replayed[0] == traced[0]
    assert name in _TRACED or replayed[1] >= _CHANGED_AT - 2
    assert unchanged[0][:_CHANGED_AT] == traced[0][:_CHANGED_AT]
    assert unchanged[0][_CHANGED_AT + 1] != traced[0][_CHANGED_AT + 1]


def _run(replay: bool | str, name: str, *, changed: bool = True) -> tuple[list[float], int]:
    make, change = _CASES[name]
    losses, step = _losses(replay, make, change if changed else lambda net: None)
    return losses, step.replays


@isolated
def test_a_mock_in_place_of_a_function_of_torch_is_called() -> None:
    inputs, net, seen = torch.ones(2, _WIDTH).to(DEVICE), _Net().to(DEVICE), []

    def step(inputs: torch.Tensor) -> torch.Tensor:
        loss = torch.sin(net(inputs)).sum()
        loss.backward()
        return loss

    with mock.patch("torch.Tensor.backward") as backward:
        compiled = CompiledStep(step, modules=[net])
        for _ in range(5):
            seen.append(float(compiled(inputs)))
    assert backward.call_count == 5
    assert len(set(seen)) == 1


def _twice(own: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: 2 * own(*args, **kwargs)


def _twice_by_its_name(own: Callable[..., Any]) -> Callable[..., Any]:
    return functools.wraps(own)(_twice(own))


def _twice_by_a_mock(own: Callable[..., Any]) -> Callable[..., Any]:
    return mock.Mock(side_effect=_twice(own))


@pytest.mark.parametrize("kind", [_twice, _twice_by_its_name, _twice_by_a_mock])
@isolated
def test_a_function_that_replaces_and_calls_a_function_of_torch_is_called_once(kind: Callable[..., Any]) -> None:
    """Torch names its Python functions to modes by their globals, which the mode of a step would call again."""
    functional = nn.functional
    x, target = torch.randn(4, 6), torch.tensor([0, 1, 2, 3])
    calls: dict[str, Callable[[Any, Any], torch.Tensor]] = {
        "cross_entropy": lambda x, target: functional.cross_entropy(x, target),
        "silu": lambda x, target: functional.silu(x),
        "layer_norm": lambda x, target: functional.layer_norm(x, (6,)),
        "embedding": lambda x, target: functional.embedding(target, x),
        "dropout": lambda x, target: functional.dropout(x, 0.0),
    }
    for name, call in calls.items():
        plain = call(x, target)
        step = CompiledStep(call)
        # Before the step has run, between two steps, and back.
        for factor in (2, 1, 2):
            with mock.patch.object(functional, name, kind(getattr(functional, name))) if factor == 2 else nullcontext():
                for _ in range(4):
                    found = step(x.to(DEVICE), target.to(DEVICE)).cpu()
                    assert torch.allclose(found, factor * plain, atol=1e-6), (name, factor)

    def inside(x: Any, target: Any) -> torch.Tensor:
        with mock.patch.object(functional, "cross_entropy", kind(functional.cross_entropy)):
            return functional.cross_entropy(x, target)

    found = CompiledStep(inside)(x.to(DEVICE), target.to(DEVICE)).cpu()
    assert torch.allclose(found, 2 * functional.cross_entropy(x, target), atol=1e-6)
