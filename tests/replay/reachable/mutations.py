"""What a value is changed to: another one that the same code would accept."""

from __future__ import annotations

import collections
import copy
import decimal
import enum
import fractions
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

# One stands where the other might: options that code branches on.
_WORDS = (
    ("mean", "sum"),
    ("relu", "tanh"),
    ("warm", "cold"),
    ("train", "finetune"),
    ("ce", "l2"),
    ("main", "auxiliary"),
    ("a", "b"),
)
_OTHER_WORD = {word: other for pair in _WORDS for word, other in (pair, pair[::-1])}
_OTHER_DTYPE = {torch.float32: torch.bfloat16, torch.bfloat16: torch.float32}
CONTAINERS = (list, dict, set, frozenset, tuple, collections.deque)
NUMBERS = (bool, int, float, str, np.generic, decimal.Decimal, fractions.Fraction, enum.Enum, torch.dtype)

Make = Callable[[], Any]


def replacements(value: Any) -> Iterator[tuple[str, Make]]:
    """Other values for the place that holds this one, by what is done to it; made when they are called for."""
    if isinstance(value, NUMBERS):
        other = _other_number(value)
        if other is not None:
            yield f"{_said(value)} -> {_said(other)}", lambda: other
    elif isinstance(value, torch.Tensor):
        yield "replaced by half of it", lambda: _half_tensor(value)
    elif isinstance(value, np.ndarray):
        yield "replaced by half of it", lambda: value * value.dtype.type(0.5)
    elif isinstance(value, slice):
        yield "one longer", lambda: slice(value.start, (value.stop or 0) + 1, value.step)
    elif isinstance(value, range):
        yield "one longer", lambda: range(value.start, value.stop + 1, value.step)
    elif isinstance(value, functools.partial):
        yield "another function in it", lambda: functools.partial(halved(value.func), *value.args, **value.keywords)
    elif isinstance(value, nn.Module):
        yield "replaced by another with half its weights", lambda: _half_module(value)
    elif isinstance(value, type) or value is None or isinstance(value, types.ModuleType):
        return
    elif isinstance(value, tuple):
        yield from _of_tuple(value)
    elif isinstance(value, CONTAINERS):
        yield "replaced by an equal copy", lambda: copy.copy(value)
    elif isinstance(value, torch.optim.Optimizer):
        return
    elif is_function(value):
        yield "replaced by one that returns half", lambda: halved(value)
        yield "replaced by one that returns the negative", lambda: negated(value)
    elif hasattr(value, "__dict__") or hasattr(type(value), "__slots__"):
        yield "replaced by an equal copy", lambda: copy.copy(value)


def _said(value: Any) -> str:
    # Numpy's own text depends on its version.
    return f"{type(value).__name__}({value})" if isinstance(value, np.generic) else repr(value)


def is_function(value: Any) -> bool:
    """Whether it is a function, of whoever."""
    return isinstance(value, (types.FunctionType, types.MethodType, types.BuiltinFunctionType))


def _of_tuple(value: tuple[Any, ...]) -> Iterator[tuple[str, Make]]:
    if type(value) is tuple and value:
        yield "without its last item", lambda: value[:-1]
        yield "turned round", lambda: value[::-1]


def _other_number(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        members = list(type(value))
        return members[(members.index(value) + 1) % len(members)]
    if isinstance(value, (bool, np.bool_)):
        return type(value)(not value)
    if isinstance(value, str):
        return _OTHER_WORD.get(value, value + "x")
    if isinstance(value, torch.dtype):
        return _OTHER_DTYPE.get(value)
    if isinstance(value, (int, np.integer)):
        return type(value)(value + 1)
    half = {decimal.Decimal: decimal.Decimal("0.5"), fractions.Fraction: fractions.Fraction(1, 2)}.get(type(value), 0.5)
    return type(value)(value * half if value else 0.25)


def _half_tensor(value: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        half = changed_values(value)
    return nn.Parameter(half, requires_grad=value.requires_grad) if isinstance(value, nn.Parameter) else half


def changed_values(value: torch.Tensor) -> torch.Tensor:
    """As many other numbers, which code that takes them for indices accepts."""
    value = value.detach()
    if value.dtype == torch.bool:
        return ~value
    if value.is_floating_point() or value.is_complex():
        return value * 0.5 + 0.01
    return torch.where(value > 0, value - 1, value + 1)


def _half_module(value: nn.Module) -> nn.Module:
    other = copy.deepcopy(value)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(0.5)
    return other


def in_place(value: Any) -> Iterator[tuple[str, Callable[[], object]]]:
    """Changes of a container or tensor that stays the object that it is."""
    if isinstance(value, (list, collections.deque)):
        if value:
            yield "last item appended again", lambda: value.append(value[-1])
        if len(value) > 1:
            yield "last item removed", lambda: value.pop()
            yield "turned round", lambda: value.reverse()
    elif isinstance(value, dict):
        if len(value) > 1:
            yield "last key removed", lambda: value.popitem()
            yield "first key moved to the end", lambda: _rotate(value)
    elif isinstance(value, set):
        if value and all(isinstance(item, (int, str)) for item in value):
            yield "an item discarded", lambda: value.discard(min(value, key=repr))
    elif isinstance(value, np.ndarray):
        yield "halved in place", lambda: value.__imul__(value.dtype.type(0.5))
    elif isinstance(value, torch.Tensor):
        yield from _of_tensor(value)
    elif isinstance(value, nn.Module):
        yield "a forward hook added", lambda: value.register_forward_hook(_halving_hook)
        yield "a forward pre-hook added", lambda: value.register_forward_pre_hook(_halving_pre_hook)
        for group in (value._modules, value._parameters, value._buffers):
            if len(group) > 1:
                first = next(iter(group))
                yield f"its {first} moved to the end", functools.partial(_rotate, group)
    elif isinstance(value, torch.optim.Optimizer):
        yield "a hook added behind its step", lambda: value.register_step_post_hook(_decaying_hook)


def _of_tensor(value: torch.Tensor) -> Iterator[tuple[str, Callable[[], object]]]:
    yield "filled in place", lambda: _fill(value)
    if value.is_leaf and value.is_floating_point():
        yield "its data replaced", lambda: setattr(value, "data", changed_values(value))
        if isinstance(value, nn.Parameter):
            yield "frozen or thawed", lambda: value.requires_grad_(not value.requires_grad)
        if value.requires_grad:
            yield "a gradient given", lambda: setattr(value, "grad", torch.ones_like(value) * 0.1)
            yield "a hook on its gradient added", lambda: value.register_hook(lambda gradient: gradient * 0.5)


def _fill(value: torch.Tensor) -> None:
    with torch.no_grad():
        value.copy_(changed_values(value))


def _rotate(value: dict[Any, Any]) -> None:
    key = next(iter(value))
    value[key] = value.pop(key)


def _halving_hook(module: nn.Module, args: Any, output: Any) -> Any:
    return _half(output)


def _halving_pre_hook(module: nn.Module, args: Any) -> Any:
    return tuple(item * 0.5 if isinstance(item, torch.Tensor) and item.is_floating_point() else item for item in args)


def _decaying_hook(optimizer: torch.optim.Optimizer, *args: Any) -> None:
    with torch.no_grad():
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.mul_(0.9)


def halved(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of the same signature that returns half as much, or the opposite."""

    def other(*args: Any, **kwargs: Any) -> Any:
        return _half(function(*args, **kwargs))

    return other


def negated(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of the same signature that returns the negative."""

    def other(*args: Any, **kwargs: Any) -> Any:
        found = function(*args, **kwargs)
        is_number = isinstance(found, (int, float, torch.Tensor)) and not isinstance(found, bool)
        return -found if is_number else _half(found)

    return other


def _half(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value * 0.5 if value.is_floating_point() else value
    if isinstance(value, NUMBERS):
        return _other_number(value)
    if type(value) in (list, tuple):
        return type(value)(map(_half, value))
    if isinstance(value, dict):
        return type(value)({key: _half(item) for key, item in value.items()})
    return value


def other_member(member: Any) -> Iterator[tuple[str, Make]]:
    """Other definitions for the place in a class that holds this one."""
    if isinstance(member, property) and member.fget is not None:
        yield "another getter", lambda: property(halved(member.fget), member.fset)  # type: ignore[arg-type]
    elif isinstance(member, functools.cached_property):
        return
    elif isinstance(member, (staticmethod, classmethod)):
        yield "another function in it", lambda: type(member)(halved(member.__func__))
    elif isinstance(member, types.FunctionType):
        yield "replaced by one that returns half", lambda: halved(member)
    elif not hasattr(type(member), "__set__") or type(member).__module__ not in ("builtins", "collections"):
        yield from replacements(member)
