"""`OperationLog`: the torch calls of one traced call of a step, in order, to tell later why a graph differs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from types import MethodWrapperType
from typing import Any, NamedTuple

import torch

from xla_adapters.utils.location import is_plumbing, plumbing_files
from xla_adapters.utils.torch_modes import device_type

_CALL = Callable[..., Any]
_Tensor, _Parameter = torch.Tensor, torch.nn.Parameter
_new_call: Callable[..., Any] = tuple.__new__
# Calls that copy numbers from the host.
_COPIES: frozenset[Callable[..., Any]] = frozenset({torch.tensor, torch.as_tensor, torch.scalar_tensor})
# The number that the next node of autograd's graph gets in this thread.
next_node: Callable[[], int] = torch._C._autograd._get_sequence_nr
_PLAIN = frozenset({int, float, bool, str, complex, type(None), torch.dtype, torch.device, type(Ellipsis)})


class Call(NamedTuple):
    """A call of a torch function.

    Attributes:
        function: what was called.
        file, line: where, with torch's own code skipped.
        numbers: the arguments that are no tensors.
        form: shape, dtype and whether a gradient is needed, of the result.
        inputs: of each positional argument, shape and dtype if it is a tensor.
    """

    function: Callable[..., Any]
    file: str
    line: int
    numbers: tuple[Any, ...]
    form: Any
    inputs: tuple[Any, ...]


class ModuleCall(NamedTuple):
    """A call of a module.

    Attributes:
        kind: the module's class.
        training: its mode.
        hooks: how many hooks are called around it, and with the gradients of its own parameters.
        needed: of each of its own parameters, whether it gets a gradient.
        present: of each, whether it has one.
        autocast: the dtype of the autocast that is on; None if none is.
        file, line: where, with torch's own code skipped.
    """

    kind: type
    training: bool
    hooks: int
    needed: tuple[bool, ...]
    present: tuple[bool, ...]
    autocast: torch.dtype | None
    file: str
    line: int


class UpdateCall(NamedTuple):
    """A step of an optimizer.

    Attributes:
        kind: the optimizer's class.
        options: of each group of parameters, by name, without the learning rate.
        rates: the learning rate of each group.
        numbers: those of all its options, with the rates.
        updated: which of its parameters have a gradient, by their position among all.
        hooks: how many hooks are called around it.
        file, line: where, with torch's own code skipped.
    """

    kind: type
    options: tuple[tuple[tuple[str, Any], ...], ...]
    rates: tuple[Any, ...]
    numbers: tuple[float, ...]
    updated: tuple[int, ...]
    hooks: int
    file: str
    line: int


class OperationLog:
    """What a step does, from what Python calls. Holds no tensors.

    Attributes:
        entries: in the order of the calls.
        first_node: `next_node()` when the present call of a torch function began.
        was_split: whether a part of the step was executed before its end.
    """

    __slots__ = ("_makers", "entries", "first_node", "was_split")

    def __init__(self) -> None:
        self.entries: list[Call | ModuleCall | UpdateCall] = []
        self.first_node = 0
        self.was_split = False
        # Of calls that made nodes: the first one's number, that after the last one's, and the call.
        self._makers: list[tuple[int, int, Call]] = []

    def call(self, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> None:
        """Notes a call of a torch function that may shape the graph.

        Others are attributes, switches, what is computed on the host, and copies from there: inputs of the graph, which
        are seen where they are used.
        """
        if type(function) is MethodWrapperType or function in _COPIES or not _is_of_the_device(args, result):
            return
        if function is torch.Tensor.to and args[0] is result and not any(isinstance(v, torch.dtype) for v in args):
            # The tensor was there already.
            return
        self.device_call(function, args, kwargs, result)

    def device_call(self, function: _CALL, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> None:
        """Notes a call that computes on the device. It is made for most calls of a step, so it is kept fast."""
        inputs: list[Any] = []
        numbers: list[Any] = []
        for value in args:
            kind = type(value)
            if kind is _Tensor or kind is _Parameter:
                inputs.append((tuple(value.shape), value.dtype))
                numbers.append(kind.__name__)
            else:
                inputs.append((tuple(value.shape), value.dtype) if isinstance(value, _Tensor) else None)
                numbers.append(value if kind in _PLAIN else _plain((value,))[0])
        if kwargs:
            numbers.extend((name, _plain((value,))) for name, value in kwargs.items())
        form: Any = (
            (tuple(result.shape), result.dtype, result.requires_grad) if type(result) is _Tensor else _form(result)
        )
        frame = sys._getframe(1)
        known = plumbing_files
        while known.get(frame.f_code.co_filename, True):
            if not is_plumbing(frame.f_code.co_filename) or frame.f_back is None:
                break
            frame = frame.f_back
        place = frame.f_code.co_filename, frame.f_lineno
        call = _new_call(Call, (function, *place, tuple(numbers), form, tuple(inputs)))
        self.entries.append(call)
        following = next_node()
        if following != self.first_node:
            self._makers.append((self.first_node, following, call))

    def maker(self, node: int) -> Call | None:
        """The call that made a node of autograd's graph; None if that was done at a place that the log does not see.

        Args:
            node: its sequence number.
        """
        return next((call for first, following, call in self._makers if first <= node < following), None)

    def module(self, module: torch.nn.Module) -> None:
        """Notes that a module is called."""
        hooks = len(module._forward_hooks) + len(module._forward_pre_hooks) + len(module._backward_hooks)
        needed: list[bool] = []
        present: list[bool] = []
        if module._parameters:
            with torch._C.DisableTorchFunction():
                for leaf in module._parameters.values():
                    if leaf is not None:
                        needed.append(leaf.requires_grad)
                        # `functional_call` puts results in the place of parameters: torch warns where their gradient is
                        # looked at.
                        present.append(leaf.is_leaf and leaf.grad is not None)
                        hooks += sum([len(found) for found in _hooks_of(leaf) if found])
        kind = device_type()
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        entry = ModuleCall(type(module), module.training, hooks, tuple(needed), tuple(present), autocast, *_place())
        self.entries.append(entry)

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """Notes that an optimizer steps."""
        options = []
        numbers: list[Any] = []
        for group in optimizer.param_groups:
            own = {name: value for name, value in group.items() if name not in ("params", "lr", "initial_lr")}
            # Not their `repr`: an option may hold tensors, whose values would be read.
            options.append(tuple(zip(own, _plain(own.values()), strict=True)))
            numbers += [value for value in (group.get("lr"), *own.values()) if type(value) in (int, float)]
        rates = _plain(group.get("lr") for group in optimizer.param_groups)
        with torch._C.DisableTorchFunction():
            leaves = [leaf for group in optimizer.param_groups for leaf in group["params"]]
            updated = tuple([index for index, leaf in enumerate(leaves) if leaf.grad is not None])
        hooks = len(optimizer._optimizer_step_pre_hooks) + len(optimizer._optimizer_step_post_hooks)
        self.entries.append(
            UpdateCall(type(optimizer), tuple(options), rates, tuple(numbers), updated, hooks, *_place())
        )


def _hooks_of(leaf: torch.Tensor) -> tuple[Any, Any]:
    """Those of a tensor that are called with its gradient, and when that has been accumulated; each may be None."""
    return leaf._backward_hooks, leaf._post_accumulate_grad_hooks


def _is_of_the_device(args: Iterable[Any], result: Any) -> bool:
    """Whether a call is given tensors of the device, or makes one from none at all, or one that needs a gradient."""
    given = [tensor for value in args if (tensor := _first_tensor(value)) is not None]
    made = _first_tensor(result)
    device = device_type()
    if made is not None and made.requires_grad:
        given.append(made)
    return any(tensor.device.type == device for tensor in given or ([] if made is None else [made]))


def _first_tensor(value: Any) -> torch.Tensor | None:
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, (list, tuple)):
        return next((tensor for item in value if (tensor := _first_tensor(item)) is not None), None)
    return None


def _plain(values: Iterable[Any]) -> tuple[Any, ...]:
    found: list[Any] = []
    for value in values:
        kind = type(value)
        if kind in _PLAIN:
            found.append(value)
        elif kind is tuple or kind is list or kind is torch.Size:
            found.append(_plain(value))
        elif kind is slice:
            found.append(("slice", *_plain((value.start, value.stop, value.step))))
        else:
            found.append(kind.__name__)
    return tuple(found)


def _form(result: Any) -> Any:
    if isinstance(result, torch.Tensor):
        return tuple(result.shape), result.dtype, result.requires_grad
    if isinstance(result, (tuple, list)):
        return tuple(map(_form, result))
    return None


def _place() -> tuple[str, int]:
    frame = sys._getframe(2)
    while is_plumbing(frame.f_code.co_filename) and frame.f_back is not None:
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno
