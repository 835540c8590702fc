"""Replayed steps that wait to be executed together, and what has them executed at once."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode

from xla_adapters.utils.location import current_location
from xla_adapters.utils.torch_modes import leave_function_mode


class Waiting(Protocol):
    """Steps that wait."""

    def settle(self, why: str) -> None:
        """Executes them; `why` is what needs it, in words."""


_waiting: list[Waiting] = []


def settle(why: str, *, but: Waiting | None = None) -> None:
    """Has every step executed that waits.

    Args:
        why: what needs it, in words.
        but: steps that may go on waiting.
    """
    for steps in [steps for steps in _waiting if steps is not but]:
        steps.settle(why)


_TENSOR = vars(torch._C.TensorBase)
# What a tensor tells without its value.
METADATA = {
    *(
        _TENSOR[name].__get__
        for name in ("shape", "dtype", "device", "ndim", "layout", "names", "is_meta", "is_sparse")
        # torch 2.13 has no named tensors.
        if name in _TENSOR
    ),
    *(_TENSOR[name].__get__ for name in ("requires_grad", "is_leaf", "grad_fn", "grad", "_grad", "_version")),
    *(_TENSOR[name].__get__ for name in ("_backward_hooks", "_post_accumulate_grad_hooks")),
    torch.Tensor.size,
    torch.Tensor.dim,
    torch.Tensor.ndimension,
    torch.Tensor.numel,
    torch.Tensor.nelement,
    torch.Tensor.stride,
    torch.Tensor.element_size,
    torch.Tensor.is_floating_point,
    torch.Tensor.is_complex,
    torch.Tensor.__len__,
    torch.Tensor.__hash__,
}


def storage_of(tensor: torch.Tensor) -> int:
    """Names what a tensor shares with its views and aliases."""
    return int(tensor.untyped_storage()._cdata)


class StateWatch(TorchFunctionMode):
    """Has steps executed that wait when a tensor is used that they change, or a view of one.

    It lies below whatever other modes there are or come, so that each of them finds its own when it ends. It sees what
    its own thread does.

    Args:
        waiting: the steps.
    """

    def __init__(self, waiting: Waiting) -> None:
        super().__init__()
        self._steps = waiting
        self._thread = 0
        self.storages: set[int] = set()

    def begin(self) -> None:
        """Steps wait from here on."""
        self._remove()
        self._thread = threading.get_ident()
        above = [_pop_mode() for _ in _get_current_function_mode_stack()]
        for mode in (self, *reversed(above)):
            _push_mode(mode)
        _waiting.append(self._steps)

    def end(self) -> None:
        """None waits any more."""
        self.storages = set()
        _waiting.remove(self._steps)
        self._remove()

    def _remove(self) -> None:
        # From another thread it stays, and finds nothing to watch over.
        if self._thread == threading.get_ident():
            leave_function_mode(self)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # What stands for a tensor knows itself what to do.
        plain = all(issubclass(kind, torch.Tensor) for kind in types)
        if (
            self.storages
            and plain
            and func not in METADATA
            and any(map(self._watches, _tensors((*args, *kwargs.values()))))
        ):
            settle(f"{getattr(func, '__name__', func)} of a tensor at {current_location()}")
        return func(*args, **kwargs)

    def _watches(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == "xla" and storage_of(tensor) in self.storages


def function_mode_stack() -> list[TorchFunctionMode]:
    """The other modes, which a trace would pass through and which may change it."""
    stack = _get_current_function_mode_stack()
    return [mode for mode in stack if not isinstance(mode, StateWatch) and not getattr(mode, "only_looks", False)]


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)
        elif isinstance(value, dict):
            yield from _tensors(value.values())
