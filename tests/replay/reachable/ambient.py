"""Changes of what surrounds a step: modes, defaults, generators, the environment."""

from __future__ import annotations

import contextlib
import os
import random
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.device import DEVICE

_COMPUTED = (torch.nn.functional.linear, torch.nn.functional.cross_entropy, torch.nn.functional.mse_loss)
_OTHERS = {
    torch.ops.aten.tanh.default: torch.ops.aten.sigmoid.default,
    torch.ops.aten.mse_loss.default: torch.ops.aten.smooth_l1_loss.default,
}


class _HalvedFunctions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        return found * 0.5 if func in _COMPUTED else found


class _OtherOperators(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _OTHERS.get(func, func)(*args, **(kwargs or {}))


def _halved(tensor: torch.Tensor) -> torch.Tensor:
    return tensor * 0.5 if tensor.is_floating_point() else tensor


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _seed_all() -> None:
    torch.manual_seed(99)
    random.seed(99)
    np.random.seed(99)


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "autocast entered": lambda: torch.autocast(DEVICE, dtype=torch.bfloat16),
    "saved_tensors_hooks entered": lambda: torch.autograd.graph.saved_tensors_hooks(_halved, _same),
    "TorchFunctionMode entered": _HalvedFunctions,
    "TorchDispatchMode entered": _OtherOperators,
    "gradients disabled": torch.no_grad,
    "anomaly detection on": lambda: torch.autograd.set_detect_anomaly(True),
}


def changes(codes: list[types.CodeType]) -> Iterator[tuple[str, str, Callable[[], Callable[[], object] | None]]]:
    """Path, name, and what makes the change and returns what takes it back.

    Args:
        codes: of the functions that were found; variables of the environment that they name are changed.
    """
    for name, make in MODES.items():
        yield "modes", name, lambda make=make: _entered(make())  # type: ignore[misc]
    yield "default dtype", "float32 -> float64", lambda: _default(torch.float64)
    yield "generators", "seeded anew", _seed_all
    for name in sorted(_environment(codes)):
        yield f"os.environ[{name!r}]", f"{os.environ[name]!r} -> '2'", lambda name=name: _environ(name)  # type: ignore[misc]


def _entered(mode: AbstractContextManager[Any]) -> Callable[[], object]:
    mode.__enter__()
    return lambda: mode.__exit__(None, None, None)


def _default(dtype: torch.dtype) -> None:
    torch.set_default_dtype(dtype)


def _environ(name: str) -> None:
    os.environ[name] = "2"


def _environment(codes: list[types.CodeType]) -> set[str]:
    named = {constant for code in codes for constant in code.co_consts if isinstance(constant, str)}
    reading = any({"environ", "getenv"} & set(code.co_names) for code in codes)
    return named & set(os.environ) if reading else set()


@contextlib.contextmanager
def restored() -> Iterator[None]:
    """Puts the defaults and the environment of the process back, and the generators to where each run begins."""
    environment, dtype = dict(os.environ), torch.get_default_dtype()
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    try:
        yield
    finally:
        torch.set_default_dtype(dtype)
        for name in set(os.environ) - set(environment):
            del os.environ[name]
        os.environ.update(environment)
