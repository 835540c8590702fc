"""torch's own modes, which a `with` leaves behind where Ctrl-C interrupts its exit."""

from __future__ import annotations

import contextlib
from operator import methodcaller
from types import CodeType

import torch
import torch.overrides
import torch.utils._python_dispatch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode

_CONTEXT_EDGES: frozenset[CodeType] = frozenset(
    getattr(contextlib._GeneratorContextManager, name).__code__ for name in ("__enter__", "__exit__")
)
_UP_AND_DOWN = (torch.autocast_increment_nesting, torch.autocast_decrement_nesting)
_call = methodcaller("__call__")
_FILES = frozenset({torch.overrides.__file__, torch.utils._python_dispatch.__file__})


class TorchModes:
    """Whether this thread records gradients and what its autocast does, as it is when this is made.

    Whoever makes it where a `with` begins, and puts it back where that ends, finds none inside still in force.
    """

    def __init__(self) -> None:
        self._gradients = torch.is_grad_enabled()
        self._autocast = torch.is_autocast_enabled("xla")
        self._dtype = torch.get_autocast_dtype("xla")
        self._caches = torch.is_autocast_cache_enabled()
        self._nesting = _autocast_nesting()

    def put_back(self) -> None:
        """Puts it back."""
        torch.set_grad_enabled(self._gradients)
        torch.set_autocast_enabled("xla", self._autocast)
        torch.set_autocast_dtype("xla", self._dtype)
        torch.set_autocast_cache_enabled(self._caches)
        while _autocast_nesting() > self._nesting:
            torch.autocast_decrement_nesting()


def _autocast_nesting() -> int:
    # There is no way to ask. In one go, so that Ctrl-C does not come in between.
    return int([*map(_call, _UP_AND_DOWN)][-1])


def leave_function_mode(mode: TorchFunctionMode) -> None:
    """Takes a mode off this thread's stack, wherever it stands, and however often."""
    modes = _get_current_function_mode_stack()
    if mode in modes:
        for _ in modes:
            _pop_mode()
        for other in modes:
            if other is not mode:
                _push_mode(other)


def finish_interrupted_exits(error: BaseException) -> None:
    """Has torch put function modes back, where an error has interrupted it in that.

    It takes them off its stack for a while by generators, which otherwise put them back when the error is let go of: a
    mode of a step that is long over, in the middle of something else.
    """
    seen: set[int] = set()
    met: BaseException | None = error
    while met is not None and id(met) not in seen:
        seen.add(id(met))
        traceback = met.__traceback__
        while traceback is not None:
            if traceback.tb_frame.f_code in _CONTEXT_EDGES:
                generator = getattr(traceback.tb_frame.f_locals.get("self"), "gen", None)
                if generator is not None and generator.gi_code.co_filename in _FILES:
                    generator.close()
            traceback = traceback.tb_next
        met = met.__context__
