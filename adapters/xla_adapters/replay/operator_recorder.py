"""`OperatorRecorder`: the function mode that notes which operators run on stand-ins, and with which numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from numbers import Real
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from xla_adapters.replay.tensor_places import CannotReplay

# Operators whose Python numbers become inputs of the graph; those of all others are part of the graph.
_WITH_INPUTS = frozenset(
    f"{prefix}{name}{suffix}"
    for name in ("add", "sub", "mul", "div", "addcmul", "addcdiv", "lerp")
    for prefix in ("", "_foreach_")
    for suffix in ("", "_")
) | {f"__{prefix}{name}__" for name in ("add", "sub", "mul", "div", "truediv") for prefix in ("", "r", "i")}


class OperatorRecorder(TorchFunctionMode):
    """Records the operators that an optimizer runs on stand-ins (tensors on `meta`), and their other arguments.

    Args:
        skipped: operators that are recorded but not run: any stand-in serves as their result.

    Attributes:
        numbers: arguments that may be inputs of the graph, in order.
        constants: the text of the other arguments, in order.
        operators: the operators, in order.
        computing: those that returned a tensor.
    """

    def __init__(self, skipped: set[Callable[..., Any]]) -> None:
        super().__init__()
        self.numbers: list[float] = []
        self.constants: list[str] = []
        self.operators: list[Callable[..., Any]] = []
        self.computing: set[Callable[..., Any]] = set()
        self._skipped = skipped

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        stand_in = None
        name = getattr(func, "__name__", "")
        if name not in ("__get__", "__set__"):
            numbers: list[float] = []
            others: list[str] = []
            stand_in = _collect((*args, *kwargs.values()) if kwargs else args, numbers, others)
            if stand_in is not None:
                self.operators.append(func)
                if name in _WITH_INPUTS:
                    self.numbers.extend(numbers)
                else:
                    self.constants.extend(map(repr, numbers))
                self.constants.extend(others)
                if func in self._skipped:
                    return stand_in
        result = func(*args, **kwargs)
        if stand_in is not None and isinstance(result, torch.Tensor):
            self.computing.add(func)
        return result


def _collect(values: Iterable[Any], numbers: list[float], others: list[str]) -> torch.Tensor | None:
    """Collects an operator's arguments that are no stand-ins; returns the first stand-in among them.

    Args:
        values: the arguments.
        numbers: gets those that are numbers, except bools.
        others: gets the text of the others.

    Raises:
        CannotReplay: an argument is a tensor on a device.
    """
    stand_in = None
    for value in values:
        if type(value) is float or type(value) is int:
            # The usual case: `Real` is asked by a function of Python.
            numbers.append(float(value))
        elif isinstance(value, torch.Tensor):
            if value.is_meta:
                stand_in = value if stand_in is None else stand_in
            elif value.device.type != "cpu":
                # The number it was made from cannot be known, and may differ in a later call.
                raise CannotReplay("it makes a tensor on the device")
            elif value.ndim == 0:
                numbers.append(float(value))
        elif isinstance(value, Real) and not isinstance(value, bool):
            # Including numpy's.
            numbers.append(float(value))
        elif isinstance(value, (list, tuple)):
            inside = _collect(value, numbers, others)
            stand_in = inside if stand_in is None else stand_in
        elif value is None or isinstance(value, (bool, str, slice, torch.dtype, torch.device)):
            others.append(repr(value))
    return stand_in
