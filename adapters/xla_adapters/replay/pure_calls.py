"""Calls that do nothing beside what the graph or their result holds."""

from __future__ import annotations

import builtins
import collections
import contextlib
import functools
import itertools
import math
import operator
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from xla_adapters.location import is_of_user

_BUILTINS = (
    "abs all any bool dict divmod enumerate filter float frozenset int isinstance issubclass len list map "
    "max min range repr reversed round set slice sorted str sum tuple type zip hasattr callable "
)
_CREATION = (
    "arange as_tensor empty eye finfo full iinfo is_grad_enabled is_tensor linspace logspace ones rand "
    "randint randn randperm scalar_tensor tensor zeros Size device is_floating_point is_complex "
    "multinomial normal "
)
# Others call methods, read attributes, or change what they are given.
_OPERATORS = "add sub mul matmul truediv floordiv mod pow neg pos abs lt le eq ne ge gt is_ is_not and_ or_ xor "
# Of the standard library: they hold what they are given, or hand it out one by one.
_CONTAINERS = (
    collections.OrderedDict,
    collections.deque,
    itertools.chain,
    itertools.islice,
    itertools.zip_longest,
)
# Objects of these only switch modes.
CONTEXTS = (
    torch.no_grad,
    torch.enable_grad,
    torch.set_grad_enabled,
    torch.inference_mode,
    torch.autocast,
    torch.amp.autocast_mode.autocast,
    contextlib.nullcontext,
)
# Modules of plain computations on tensors.
_MODULES = (
    "torch.nn.functional torch.functional torch.special torch.linalg torch.fft torch._tensor torch._VF "
    "torch.nn.utils.clip_grad torch.nn.init einops.einops "
)
# Methods that leave a container as it is.
_READING = (
    "get items keys values index count copy __getitem__ __len__ __contains__ __iter__ union intersection "
    "difference format join split strip lower upper startswith endswith replace removeprefix removesuffix "
)
READING_METHODS = frozenset(_READING.split())


@functools.cache
def _functions() -> frozenset[int]:
    found: list[Any] = [
        function for group in torch.overrides.get_overridable_functions().values() for function in group
    ]
    found += [getattr(builtins, name) for name in _BUILTINS.split()]
    found += [getattr(torch, name) for name in _CREATION.split()]
    found += [value for value in vars(math).values() if callable(value)]
    found += [getattr(operator, name) for name in _OPERATORS.split()]
    found += [value for name, value in vars(torch).items() if name.startswith("_foreach_")]
    found += [*_CONTAINERS, *CONTEXTS, torch.autograd.grad, torch.func.functional_call, torch.cuda.amp.autocast]
    return frozenset(map(id, found))


def is_pure(function: Callable[..., Any]) -> bool:
    """Whether a function or class is known to have no effect beside tensors."""
    if isinstance(function, types.FunctionType) and is_of_user(function.__code__.co_filename):
        # One that wraps a library's goes by its module, or may have been put in its place.
        return False
    # The device's package may have put others in the places of these.
    if id(function) in _functions() or function in (nn.utils.clip_grad_norm_, nn.utils.clip_grad_value_):
        return True
    if isinstance(function, type) and issubclass(function, BaseException):
        return True
    kinds = (types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType)
    return isinstance(function, kinds) and getattr(function, "__module__", None) in _MODULES.split()
