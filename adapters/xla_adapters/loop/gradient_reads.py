"""Does code between two steps look at the gradients of the step before?"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch.optim import lr_scheduler

_LIBRARIES = frozenset(("torch", "transformers", "lightning", "lightning_strategy", "hf_trainer", "xla_adapters"))
_HARMLESS = {"no_grad", "enable_grad", "set_grad_enabled", "is_grad_enabled", "requires_grad", "requires_grad_"}
_HARMLESS |= {"zero_grad", "accumulate_grad_batches"}


def schedule_sees_gradients(schedule: Any) -> bool:
    """Whether the step of a learning rate schedule may look at gradients, as that of transformers' `AdafactorSchedule`.

    Args:
        schedule: of torch, or something with a `step` of its own; None is none.
    """
    if schedule is None:
        return False
    if type(schedule).__module__ != lr_scheduler.__name__:
        return True
    functions = getattr(schedule, "lr_lambdas", None) or [getattr(schedule, "lr_lambda", None)]
    parts = getattr(schedule, "_schedulers", ())
    return any(map(mentions_gradients, functions)) or any(map(schedule_sees_gradients, parts))


def mentions_gradients(function: Any) -> bool:
    """Whether a function of the user's, or one that it calls by a name, has `grad` in a name.

    Args:
        function: anything that can be called; None calls nothing.
    """
    try:
        return any(
            "grad" in name.lower() and name not in _HARMLESS
            for code in _codes(function, set())
            for name in _names(code)
        )
    except (RecursionError, ValueError):
        # Too many functions, or a variable of an outer function that has no value yet.
        return True


def _codes(function: Any, seen: set[CodeType]) -> Iterator[CodeType]:
    """The code of a function and of the functions that it names, as far as they are the user's."""
    while isinstance(function, functools.partial):
        function = function.func
    owner = getattr(function, "__self__", None)
    if not isinstance(function, (FunctionType, MethodType)):
        # An object that can be called.
        owner, function = function, type(function).__call__ if callable(function) else None
    function = getattr(function, "__func__", function)
    # What is built in is no such function.
    if not isinstance(function, FunctionType) or str(function.__module__).partition(".")[0] in _LIBRARIES:
        return
    if function.__code__ in seen:
        return
    seen.add(function.__code__)
    yield function.__code__
    variables = inspect.getclosurevars(function)
    for value in (*variables.nonlocals.values(), *variables.globals.values()):
        if isinstance(value, (FunctionType, MethodType)):
            yield from _codes(value, seen)
    modules = [value for value in variables.globals.values() if isinstance(value, ModuleType)]
    # In the order of the code: `package.module.function`.
    for name in function.__code__.co_names:
        for module in list(modules):
            called = vars(module).get(name)
            if isinstance(called, ModuleType):
                modules.append(called)
            elif isinstance(called, FunctionType):
                yield from _codes(called, seen)
    for name in variables.unbound:
        value = getattr(type(owner), name, None)
        if isinstance(value, FunctionType):
            yield from _codes(MethodType(value, owner), seen)


def _names(code: CodeType) -> Iterator[str]:
    """Names of variables and attributes in code, and its short strings, which may be names of attributes."""
    yield from code.co_names
    yield from code.co_freevars
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
        elif isinstance(constant, str) and constant.isidentifier():
            yield constant
