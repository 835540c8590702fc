"""Cleans up torch's thread-wide modes after Ctrl-C has interrupted the exit of a `with` block."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import wraps
from operator import methodcaller
from types import CodeType, GeneratorType
from typing import ParamSpec, TypeVar

import torch
import torch.overrides
import torch.utils._python_dispatch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils._python_dispatch import _disable_current_modes

from xla_adapters.utils.device_type import device_type

_CONTEXT_EDGES: frozenset[CodeType] = frozenset(
    getattr(contextlib._GeneratorContextManager, name).__code__ for name in ("__enter__", "__exit__")
)
_UP_AND_DOWN = (torch.autocast_increment_nesting, torch.autocast_decrement_nesting)
_call = methodcaller("__call__")
_P = ParamSpec("_P")
_R = TypeVar("_R")


class TorchModes:
    """A snapshot of torch's gradient mode, autocast settings for XLA and compiling flag, taken when it is created.

    Create it before a `with` block and call `restore()` after it: no mode of the block is then still active.
    """

    def __init__(self) -> None:
        self._gradients = torch.is_grad_enabled()
        self._autocast = torch.is_autocast_enabled(device_type())
        self._dtype = torch.get_autocast_dtype(device_type())
        self._caches = torch.is_autocast_cache_enabled()
        self._nesting = _autocast_nesting()
        self._compiling = torch.compiler._is_compiling_flag

    def restore(self, *, compiling: bool = True) -> None:
        """Sets the modes to what they were.

        Args:
            compiling: whether the compiling flag is one of them.
        """
        torch.set_grad_enabled(self._gradients)
        torch.set_autocast_enabled(device_type(), self._autocast)
        torch.set_autocast_dtype(device_type(), self._dtype)
        torch.set_autocast_cache_enabled(self._caches)
        while _autocast_nesting() > self._nesting:
            torch.autocast_decrement_nesting()
        if compiling:
            torch.compiler._is_compiling_flag = self._compiling


def _autocast_nesting() -> int:
    # torch cannot return the nesting without changing it. `map` runs both calls in C, so Ctrl-C cannot come in between.
    return int([*map(_call, _UP_AND_DOWN)][-1])


def without_dispatch_modes(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorator: disables the user's dispatch modes while the function runs.

    Under such a mode torch returns the raw device tensor instead of a functional tensor.
    """

    @wraps(function)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if not torch._C._len_torch_dispatch_stack():
            return function(*args, **kwargs)
        with _disable_current_modes():
            return function(*args, **kwargs)

    return run


def leave_function_mode(mode: TorchFunctionMode) -> None:
    """Removes all occurrences of a mode from this thread's stack of function modes."""
    modes = _get_current_function_mode_stack()
    if mode in modes:
        for _ in modes:
            _pop_mode()
        for other in modes:
            if other is not mode:
                _push_mode(other)


def finish_interrupted_exits(error: BaseException) -> None:
    """Leaves now what an error interrupted in the middle of the entry or exit of a `with` block.

    The generator of such a context would restore what it has changed only when the error is garbage collected. For
    example torch takes modes off its stack temporarily: a mode of a finished step would become active in other code.
    """
    seen: set[int] = set()
    met: BaseException | None = error
    while met is not None and id(met) not in seen:
        seen.add(id(met))
        traceback = met.__traceback__
        while traceback is not None:
            if traceback.tb_frame.f_code in _CONTEXT_EDGES:
                generator = getattr(traceback.tb_frame.f_locals.get("self"), "gen", None)
                if isinstance(generator, GeneratorType) and not generator.gi_running:
                    generator.close()
            traceback = traceback.tb_next
        met = met.__context__
