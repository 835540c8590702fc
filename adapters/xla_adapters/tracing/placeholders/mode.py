"""`PlaceholderMode`: the function mode that gives each tensor which a step uses a placeholder."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.autograd.graph import Node
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from xla_adapters.errors import UnsupportedOptionError
from xla_adapters.lowerings import is_write_by_mask, norm_with_torchs_variance, write_where_
from xla_adapters.runtime import get_runtime
from xla_adapters.runtime.transfers import note_upload
from xla_adapters.tracing.allowed_reads import NO_RESULT, AllowedReads
from xla_adapters.tracing.operation_log import OperationLog, next_node
from xla_adapters.tracing.placeholders.numbers import Lifting
from xla_adapters.tracing.placeholders.trace import Trace
from xla_adapters.tracing.step_mode import (
    FROM_NUMBERS,
    MOVES,
    NORMALISATIONS,
    READS,
    StepMode,
    is_list_of_device_scalars,
    stacked_scalars,
)
from xla_adapters.tracing.undo_log import UndoLog
from xla_adapters.utils.patching import replaced
from xla_adapters.utils.torch_modes import function_called, in_transform, is_fake, is_of_torch

_Tensor = torch.Tensor
_CALL = Callable[..., Any]
_TENSOR = vars(torch._C.TensorBase)
# Calls that need no placeholder: they do not need the values. Not `grad`: a gradient from before the step is found with
# its leaf.
_WITHOUT_VALUES = {
    *(
        _TENSOR[name].__get__
        for name in ("shape", "dtype", "device", "ndim", "layout", "names", "is_meta", "is_sparse")
        # torch 2.13 has no named tensors.
        if name in _TENSOR
    ),
    *(_TENSOR[name].__get__ for name in ("requires_grad", "is_leaf", "grad_fn", "_version")),
    *(_TENSOR[name].__get__ for name in ("_backward_hooks", "_post_accumulate_grad_hooks")),
    _Tensor.size,
    _Tensor.dim,
    _Tensor.ndimension,
    _Tensor.numel,
    _Tensor.nelement,
    _Tensor.stride,
    _Tensor.element_size,
    _Tensor.is_floating_point,
    _Tensor.is_complex,
    _Tensor.__len__,
    _Tensor.__hash__,
}
# Calls that may copy a tensor, or other data, from the host to the device.
_MAY_COPY: frozenset[_CALL] = frozenset(
    {_Tensor.to, _Tensor.type, _Tensor.type_as, getattr(_Tensor, "tpu", _Tensor.to)}
)
# Calls that run the autograd engine, and what runs it in them.
_DIFFERENTIATES: frozenset[_CALL] = frozenset({_Tensor.backward, torch.autograd.backward, torch.autograd.grad})
_RUN = torch.autograd._engine_run_backward  # type: ignore[attr-defined]
# In the names of the nodes of functions that are written in C++.
_FUNCTION_IN_CPP = "CppNode<"
_UPLOADS: frozenset[_CALL] = frozenset({*FROM_NUMBERS, *_MAY_COPY, _Tensor.new_tensor, torch.asarray})


class PlaceholderMode(StepMode):
    """Intercepts the torch calls of a step that is traced with placeholders: gives these to tensors, and reports reads.

    Args:
        trace: gets the tensors.
        undo_log: gets the tensors that are about to be written.
        on_read, on_dynamic, on_refusal, operations, allowed_reads: as for `StepMode`.

    Attributes:
        lifting: of the update that is under way, if one is.
    """

    def __init__(
        self,
        trace: Trace,
        undo_log: UndoLog,
        on_read: Callable[[str, torch.Tensor], None],
        on_dynamic: Callable[[str, torch.Tensor], None],
        on_refusal: Callable[[str], None],
        operations: OperationLog,
        allowed_reads: AllowedReads | None = None,
    ) -> None:
        super().__init__(undo_log, on_read, on_dynamic, on_refusal, operations, allowed_reads)
        self._trace = trace
        self._is_inner = len(undo_log.chain()) > 1
        ranks = get_runtime().device.ranks
        self._around_call = None if ranks is None else ranks.around_call
        self.lifting: Lifting | None = None

    def __torch_function__(
        self, func: _CALL, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if args and is_fake(args[0]):
            return func(*args, **kwargs)
        if not is_of_torch(func):
            func = function_called(func)
        if self._around_call is not None:
            return self._around_call(self._intercepted, func, args, kwargs)
        return self._intercepted(func, args, kwargs)

    def _intercepted(self, func: _CALL, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func in _WITHOUT_VALUES:
            return func(*args, **kwargs)
        self._operations.first_node = next_node()
        if in_transform():
            # Its rules are written in Python, and are given what was made in C++.
            with _Results(self._trace):
                return self._traced(func, args, kwargs)
        return self._traced(func, args, kwargs)

    def _traced(self, func: _CALL, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func in _DIFFERENTIATES:
            return self._differentiate(func, args, kwargs)
        if func in FROM_NUMBERS and args and is_list_of_device_scalars(args[0]):
            # The calls in it are calls of the step.
            with self:
                return stacked_scalars(args[0], **kwargs)
        if func is _Tensor.__setitem__ and is_write_by_mask(*args):
            func = write_where_
        self._indices.check(func, args, kwargs)
        result = self._check(func, args, kwargs)
        if result is not NO_RESULT:
            return result
        if self.passes_on:
            return func(*args, **kwargs)
        self._take_in(args)
        self._take_in(kwargs.values())
        written = None
        if self._is_write(func, kwargs):
            self._record_writes(args, kwargs, written_through=False)
            written = self._indices.written(func, args, kwargs)
        if func is _Tensor.copy_:
            args = self._with_upload(*args, **kwargs)
            kwargs = {}
        elif func is _Tensor.__setitem__ and _is_scalar(args[2]):
            target, at, value = args
            args = (target, at, self._with_upload(target, value)[1])
        elif func is torch.scalar_tensor:
            # In a trace torch_tpu would read it.
            func, kwargs = torch.tensor, {"dtype": torch.get_default_dtype(), **kwargs}
        elif func in _MAY_COPY:
            args, kwargs = _blocking(args, kwargs)
        if func in NORMALISATIONS and any(map(_is_scalar, (*args, *kwargs.values()))):
            # The momentum of a batch norm that averages over all batches. torch would read it.
            result = norm_with_torchs_variance(func, args, kwargs)
        elif self.lifting is not None and self._has_device_tensor((*args, *kwargs.values())):
            result = self.lifting.call(func, args, kwargs)
            # Its numbers are no part of the program, and never why another one is compiled.
            args, kwargs = tuple(value for value in args if isinstance(value, _Tensor)), {}
        else:
            result = func(*args, **kwargs)
        is_upload = func in _UPLOADS and self._may_upload(func, args)
        self._note(result, is_upload=is_upload)
        if is_upload and args and isinstance(args[0], _Tensor) and self._has_device_tensor((result,)):
            note_upload(args[0], result)
        self._operations.call(func, args, kwargs, result)
        if self._allowed_reads is not None:
            self._allowed_reads.note(func, args, kwargs, result)
        self._indices.note(func, args, kwargs, result)
        if written is not None:
            written(result)
        return result

    def _differentiate(self, func: _CALL, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the autograd engine with this mode on: hooks and backwards in Python use tensors of the step, too.

        torch switches it off in a call that it intercepted; since 2.10 `torch.autograd.backward` is one itself.
        """
        self._take_in((*args, *kwargs.values()))
        outputs: Any = args[0] if args else kwargs.get("outputs", kwargs.get("tensors"))
        nodes = list(_nodes_of(outputs))
        self._take_in(node.variable for node in nodes if hasattr(node, "variable"))
        self.undo_log.record_enclosing_leaves()

        def run(*given: Any, **options: Any) -> Any:
            # The gradients of the outputs were made in the call; given ones have placeholders.
            for tensor in tree_leaves(given):
                if isinstance(tensor, _Tensor):
                    self._trace.traced.add(tensor)
            with self, _Results(self._trace), _adding_results_of(nodes, self._trace):
                return _RUN(*given, **options)

        with replaced(torch.autograd, "_engine_run_backward", run):
            result = func(*args, **kwargs)
        self._note(result, is_upload=False)
        self._operations.call(func, args, kwargs, result)
        return result

    def _check(self, func: _CALL, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Reports what would need a value; returns the result of a read that a known library may make."""
        if func in READS:
            if args[0].device.type == self._type:
                if self._allowed_reads is not None:
                    result = self._allowed_reads.read(func, READS[func], args, kwargs)
                    if result is not NO_RESULT:
                        return result
                self._on_read(READS[func], args[0])
        elif func in MOVES:
            self._check_move(func, args, kwargs)
        else:
            result = self._check_dynamic(func, args, kwargs)
            if result is not NO_RESULT:
                return result
        generator = kwargs.get("generator")
        if generator is not None and generator.device.type == self._type:
            raise UnsupportedOptionError(
                "a torch.Generator of the device is used in a step: a trace with torch_tpu knows the device's own "
                "random stream only. Draw from that one (leave generator= out), or draw before the step"
            )
        return NO_RESULT

    def _with_upload(self, target: torch.Tensor, source: torch.Tensor, *rest: Any, **options: Any) -> tuple[Any, ...]:
        """The arguments of `copy_`, with a source on the host copied to the device first."""
        if target.device.type == self._type and source.device.type == "cpu":
            source = source.to(target.device)
            self._trace.take_in(source, is_upload=True)
        return (target, source, *rest, *options.values())

    def _may_upload(self, func: _CALL, args: tuple[Any, ...]) -> bool:
        return func is _Tensor.new_tensor or not self._has_device_tensor(args[:1])

    def _has_device_tensor(self, values: Iterable[Any]) -> bool:
        return any(
            value.device.type == self._type
            if isinstance(value, _Tensor)
            else isinstance(value, (list, tuple)) and self._has_device_tensor(value)
            for value in values
        )

    def _take_in(self, values: Iterable[Any]) -> None:
        for value in values:
            if isinstance(value, _Tensor):
                if value.device.type == self._type and not is_fake(value):
                    self._trace.take_in(value)
                    if self._is_inner:
                        self._record_in_inner(value)
            elif isinstance(value, (list, tuple)):
                self._take_in(value)
            elif isinstance(value, dict):
                self._take_in(value.values())

    def _record_in_inner(self, tensor: torch.Tensor) -> None:
        if tensor.requires_grad and tensor.is_leaf:
            self.undo_log.record_leaf(tensor)

    def _note(self, result: Any, *, is_upload: bool) -> None:
        if isinstance(result, _Tensor):
            if result.device.type == self._type and not is_fake(result):
                if is_upload:
                    self._trace.take_in(result, is_upload=True)
                else:
                    self._trace.traced.note(result)
        elif isinstance(result, (list, tuple)):
            for item in result:
                self._note(item, is_upload=is_upload)


def _is_scalar(value: Any) -> bool:
    return isinstance(value, _Tensor) and value.ndim == 0


def _has_storage(value: Any) -> bool:
    return isinstance(value, _Tensor) and value.layout is torch.strided


class _Results(TorchDispatchMode):
    """Adds what operators make to a trace: the function mode sees none of those that the autograd engine calls.

    Not views and results in place, which belong to what their arguments belong to, and not copies of the host's data.
    """

    def __init__(self, trace: Trace) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._traced = trace.traced
        self._type = get_runtime().device.torch_device().type

    def __torch_dispatch__(
        self, func: _CALL, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # Otherwise `untyped_storage` gives its tensor a placeholder.
        with torch._C.DisableTorchFunction():
            result = func(*args, **(kwargs or {}))
            given = [value for value in tree_leaves((args, kwargs)) if _has_storage(value)]
            if not given or any(tensor.device.type == self._type for tensor in given):
                storages = {tensor.untyped_storage()._cdata for tensor in given}
                for tensor in result if isinstance(result, (list, tuple)) else (result,):
                    if _has_storage(tensor) and tensor.untyped_storage()._cdata not in storages:
                        self._traced.add(tensor)
        return result


def _nodes_of(outputs: torch.Tensor | Sequence[torch.Tensor]) -> Iterator[Node]:
    """The nodes that a backward of these tensors can come to."""
    waiting = [tensor.grad_fn for tensor in ([outputs] if isinstance(outputs, _Tensor) else outputs)]
    seen: set[object] = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        waiting.extend(function for function, _ in node.next_functions)


@contextmanager
def _adding_results_of(nodes: Iterable[Node], trace: Trace) -> Iterator[None]:
    """Adds the gradients that functions written in C++ compute: `_Results` does not see them.

    torch_tpu has such functions for some operators (the cross entropy), whose backward does not call the dispatcher.
    """

    def add(gradients: Sequence[torch.Tensor | None], given: object) -> None:
        with torch._C.DisableTorchFunction():
            for gradient in gradients:
                if gradient is not None and _has_storage(gradient):
                    trace.traced.add(gradient)

    with ExitStack() as hooks:
        for node in nodes:
            if _FUNCTION_IN_CPP in node.name():
                hooks.callback(node.register_hook(add).remove)
        yield


def _blocking(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of `to` and the like without `non_blocking`: at such an upload in a trace torch_tpu aborts."""
    if kwargs.get("non_blocking"):
        kwargs = {**kwargs, "non_blocking": False}
    first = next((position for position, value in enumerate(args) if isinstance(value, bool)), None)
    return (args if first is None else (*args[:first], False, *args[first + 1 :])), kwargs
