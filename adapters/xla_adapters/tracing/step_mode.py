"""`StepMode`: the function mode that reports reads and records writes inside a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import MethodType, MethodWrapperType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from xla_adapters.errors import XLAAdapterError
from xla_adapters.lowerings import (
    ATTENTION,
    LOWERINGS,
    NORMS,
    grouped_products,
    is_write_by_mask,
    norm_with_torchs_variance,
    write_where_,
)
from xla_adapters.runtime import get_runtime
from xla_adapters.runtime.extensions import extensions
from xla_adapters.runtime.transfers import upload_scalar
from xla_adapters.tracing.allowed_reads import NO_RESULT, AllowedReads
from xla_adapters.tracing.deferred_numbers import known_numbers
from xla_adapters.tracing.index_check import LOOKUPS, IndexCheck
from xla_adapters.tracing.operand_checks import PRODUCTS, host_tensor_error, refuse_mixed_dtypes
from xla_adapters.tracing.operation_log import OperationLog, next_node
from xla_adapters.tracing.step_profile import BACKWARD, SPANS
from xla_adapters.tracing.undo_log import UndoLog
from xla_adapters.utils.torch_modes import device_type, function_called, is_fake, is_of_torch, leave_function_mode

_Tensor, _Parameter = torch.Tensor, torch.nn.Parameter
_CALL = Callable[..., Any]
_is_functional: Callable[[Any], bool] = torch._is_functional_tensor

# Calls that need the value of a tensor on the host, whatever their other arguments.
READS: dict[_CALL, str] = {
    _Tensor.item: ".item()",
    _Tensor.tolist: ".tolist()",
    _Tensor.numpy: ".numpy()",
    _Tensor.cpu: ".cpu()",
    _Tensor.__array__: "numpy conversion",
    _Tensor.__bool__: "bool(tensor)",
    _Tensor.__int__: "int(tensor)",
    _Tensor.__float__: "float(tensor)",
    _Tensor.__index__: "use as an index",
    _Tensor.__complex__: "complex(tensor)",
    _Tensor.__repr__: "print / repr",
    _Tensor.__format__: "formatting",
    _Tensor.__contains__: "`in` on a tensor",
    _Tensor.__reduce_ex__: "pickling",
    _Tensor.equal: "torch.equal",
    torch.equal: "torch.equal",
    _Tensor.allclose: "torch.allclose",
    torch.allclose: "torch.allclose",
    _Tensor.is_nonzero: "is_nonzero",
    torch.is_nonzero: "is_nonzero",
}
# Operations whose result has a shape that depends on the values of the tensor.
DYNAMIC: dict[_CALL, str] = {
    function: name
    for name, functions in {
        "nonzero": (_Tensor.nonzero, torch.nonzero, _Tensor.argwhere, torch.argwhere),
        "masked_select": (_Tensor.masked_select, torch.masked_select),
        "unique": (_Tensor.unique, torch.unique),
        "unique_consecutive": (_Tensor.unique_consecutive, torch.unique_consecutive),
        "bincount": (_Tensor.bincount, torch.bincount),
    }.items()
    for function in functions
}
_INDEXING: frozenset[_CALL] = frozenset({_Tensor.__getitem__, _Tensor.__setitem__})
_MASKED_SELECT: frozenset[_CALL] = frozenset({_Tensor.masked_select, torch.masked_select})
_REPEATS: frozenset[_CALL] = frozenset({_Tensor.repeat_interleave, torch.repeat_interleave})
_MASKS = (torch.bool, torch.uint8)
# Calls that read only if they move a tensor from the device to the host.
MOVES: frozenset[_CALL] = frozenset({_Tensor.to, _Tensor.copy_, _Tensor.type})
# Calls that make a tensor of Python numbers, or of tensors of one element.
FROM_NUMBERS: frozenset[_CALL] = frozenset({torch.tensor, torch.as_tensor, torch.scalar_tensor})
# Calls that write some of their arguments in place, and whose name does not end with an underscore.
_HIDDEN_WRITES: frozenset[_CALL] = frozenset({_Tensor.data.__set__, _Tensor.__setitem__})  # type: ignore[attr-defined]
# Calls that may change the recorded value itself (see `Values.second_copy`), as batch norm does.
_WRITE_THROUGH: frozenset[_CALL] = frozenset({_Tensor.__setitem__, write_where_, torch._foreach_copy_})
NORMALISATIONS: frozenset[_CALL] = frozenset(
    {torch.batch_norm, torch.instance_norm, torch.nn.functional.batch_norm, torch.nn.functional.instance_norm}
)
# What a tensor tells without its value.
ATTRIBUTES: frozenset[_CALL] = frozenset(
    {
        *(
            vars(torch._C.TensorBase)[name].__get__
            for name in (
                "shape",
                "dtype",
                "device",
                "ndim",
                "layout",
                "is_meta",
                "is_sparse",
                "requires_grad",
                "is_leaf",
            )
        ),
        *(_Tensor.size, _Tensor.dim, _Tensor.ndimension, _Tensor.numel, _Tensor.nelement, _Tensor.stride),
        *(_Tensor.element_size, _Tensor.is_floating_point, _Tensor.is_complex, _Tensor.__len__, _Tensor.__hash__),
    }
)

# How a call is handled: it asks for an attribute; it gets or sets a tensor's gradient or data; it computes; it computes
# unless the index has tensors, or the dtypes differ; it needs a closer look.
_ATTRIBUTE, _ACCESSES, _COMPUTES, _INDEXES, _MULTIPLIES, _SPECIAL = range(6)
_TENSOR: Any = _Tensor
_ACCESSED: frozenset[_CALL] = frozenset({_TENSOR.grad.__get__, _TENSOR.grad.__set__, _TENSOR.data.__get__})
# Calls that may shorten rows of the weight, and the position of the argument that asks for it.
_EMBEDDINGS: dict[_CALL, int] = {torch.nn.functional.embedding: 3, torch.nn.functional.embedding_bag: 3}
# Tables of the calls that need a closer look, beside lookups and lowerings.
_SPECIAL_CALLS: tuple[Any, ...] = (
    *(READS, DYNAMIC, MOVES, FROM_NUMBERS, NORMALISATIONS, _INDEXING, _REPEATS, _EMBEDDINGS),
    {torch.where, torch.arange},
)


def _renorms(function: _CALL, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    position = _EMBEDDINGS[function]
    return len(args) > 1 and (args[position] if len(args) > position else kwargs.get("max_norm")) is not None


def writes_in_place(function: _CALL) -> bool:
    """Whether a function of torch writes to one of its arguments."""
    if function in _HIDDEN_WRITES:
        return True
    name = getattr(function, "__name__", "")
    if name.startswith("__"):
        return name.startswith("__i") and name not in ("__index__", "__int__", "__iter__", "__invert__", "__init__")
    return name.endswith("_")


class StepMode(TorchFunctionMode):
    """Intercepts the torch calls of a step: reports reads, records writes, and replaces operators by their lowerings.

    It sees calls from Python only. For what happens inside C++ there are two other means: the undo log records the
    leaves, whose gradients the autograd engine accumulates, and the runtime refuses to execute for a read.

    Args:
        undo_log: gets the tensors that are about to be written.
        on_read: called with the name of the call and the tensor before a value is read on the host.
        on_dynamic: the same, before an operation whose result has a shape that depends on values.
        on_refusal: called with the name of a call for which the runtime has refused to execute.
        operations: gets every call that was made.
        allowed_reads: reads that known libraries may make; None if there are none.
    """

    def __init__(
        self,
        undo_log: UndoLog,
        on_read: Callable[[str, torch.Tensor], None],
        on_dynamic: Callable[[str, torch.Tensor], None],
        on_refusal: Callable[[str], None],
        operations: OperationLog,
        allowed_reads: AllowedReads | None = None,
    ) -> None:
        super().__init__()
        while _passing:
            leave_function_mode(_passing.pop())
        self.undo_log = undo_log
        self.passes_on = False
        self._operations = operations
        self._allowed_reads = allowed_reads
        self._indices = IndexCheck(notes=allowed_reads is None)
        self._on_read = on_read
        self._on_dynamic = on_dynamic
        self._on_refusal = on_refusal
        self._writes: dict[_CALL, bool] = {}
        self._courses: dict[_CALL, int] = {}
        runtime = get_runtime()
        self._is_refusal = runtime.tracing.is_forbidden_execution
        self._type = runtime.device.torch_device().type
        self._spmd = runtime.device.is_spmd()
        self._lowerings = {**LOWERINGS, **grouped_products(), **(NORMS | ATTENTION if self._spmd else {})}
        for extension in extensions():
            self._lowerings |= extension.lowerings(runtime)

    def __torch_function__(
        self, func: _CALL, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        first = args[0] if args else None
        kind = type(first)
        is_plain = (kind is _Tensor or kind is _Parameter) and _is_functional(first)
        try:
            if is_plain:
                course = self._courses.get(func)
                if course is None:
                    course = self._courses[func] = self._course(func)
                if course is _ATTRIBUTE:
                    return func(*args, **(kwargs or {}))
                if course is _ACCESSES:
                    return self._access(func, args)
                if course is not _SPECIAL and (course is _COMPUTES or self._is_ordinary(course, args, kwargs)):
                    return self._compute(func, args, kwargs or {})
            elif args and is_fake(first):
                return func(*args, **(kwargs or {}))
            return self._call(func, args, kwargs or {})
        except RuntimeError as error:
            if self._is_refusal(error):
                self._on_refusal(getattr(func, "__name__", ""))
            mixed = host_tensor_error(func, args, kwargs or {}, self._type) if _is_about_devices(error) else None
            if mixed is None:
                raise
            raise mixed from error

    def _course(self, func: _CALL) -> int:
        """How calls of a function are handled, if their first argument is a tensor on the device."""
        if func in ATTRIBUTES:
            return _ATTRIBUTE
        if func in _ACCESSED:
            return _ACCESSES
        if func is _Tensor.__getitem__:
            return _INDEXES
        if (
            type(func) is MethodWrapperType
            or func in self._lowerings
            or func is _Tensor.backward
            or any(func in table for table in _SPECIAL_CALLS)
            or func in LOOKUPS
            or writes_in_place(func)
            or not is_of_torch(func)
        ):
            return _SPECIAL
        return _MULTIPLIES if func in PRODUCTS else _COMPUTES

    def _access(self, func: _CALL, args: tuple[Any, ...]) -> Any:
        """Gets or sets a tensor's gradient, or gets its data."""
        tensor = args[0]
        if tensor.requires_grad and tensor.is_leaf:
            self.undo_log.record_leaf(tensor)
        result = func(*args)
        if not tensor.dtype.is_floating_point:
            self._follow(func, args, {}, result)
        return result

    @staticmethod
    def _is_ordinary(course: int, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> bool:
        """Whether a call that may need a look at its arguments needs none."""
        if course is _INDEXES:
            index = args[1]
            if type(index) is tuple:
                return not any(isinstance(part, (_Tensor, list)) for part in index)
            return not isinstance(index, (_Tensor, list))
        # A product: of tensors of one dtype.
        dtype = args[0].dtype
        return not kwargs and all(value.dtype is dtype for value in args if isinstance(value, _Tensor))

    def _compute(self, func: _CALL, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call that neither reads nor writes, unless its keyword arguments say so: nearly all calls of a step."""
        if kwargs and (kwargs.get("out") is not None or kwargs.get("inplace")):
            return self._call(func, args, kwargs)
        operations = self._operations
        operations.first_node = next_node()
        for value in args:
            kind = type(value)
            if kind is _Tensor or kind is _Parameter:
                if value.requires_grad and value.is_leaf:
                    self.undo_log.record_leaf(value)
            elif kind is list or kind is tuple or isinstance(value, _Tensor):
                self._record_leaves((value,))
        if kwargs:
            self._record_leaves(kwargs.values())
        result = func(*args, **kwargs)
        operations.device_call(func, args, kwargs, result)
        if (
            type(result) is not _Tensor
            or not result.dtype.is_floating_point
            # A part of the batch, perhaps.
            or (self._allowed_reads is not None and not result.requires_grad)
        ):
            self._follow(func, args, kwargs, result)
        return result

    def _follow(self, func: _CALL, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Follows what the host knows of the batch."""
        if self._allowed_reads is not None:
            self._allowed_reads.note(func, args, kwargs, result)
        else:
            self._indices.note(func, args, kwargs, result)

    def _call(self, func: _CALL, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not is_of_torch(func) and (own := function_called(func)) is not func:
            return self.__torch_function__(own, (), args, kwargs)
        called = func
        self._operations.first_node = next_node()
        self._indices.check(func, args, kwargs)
        refuse_mixed_dtypes(func, args, kwargs)
        if func in self._lowerings and args and _is_on_device(args[0]):
            func = self._lowerings[func]
        if func in READS:
            if args[0].device.type == device_type():
                if self._allowed_reads is not None:
                    result = self._allowed_reads.read(func, READS[func], args, kwargs)
                    if result is not NO_RESULT:
                        return result
                self._on_read(READS[func], args[0])
        elif func is _Tensor.backward:
            return self._backward(*args, **kwargs)
        elif func in MOVES:
            self._check_move(func, args, kwargs)
            if func is _Tensor.to:
                return self._noted(func, args, kwargs, upload_scalar(func, args, kwargs))
        elif func in FROM_NUMBERS:
            if args and is_list_of_device_scalars(args[0]):
                return stacked_scalars(args[0], **kwargs)
            # C++ knows numbers of Python only.
            args = known_numbers(args)
            return self._noted(func, args, kwargs, upload_scalar(func, args, kwargs))
        elif func in NORMALISATIONS:
            self._record_leaves((*args, *kwargs.values()))
            for value in (*args[1:], *kwargs.values()):
                if isinstance(value, _Tensor) and not value.requires_grad:
                    self.undo_log.record(value, written_through=True)
            return self._noted(called, args, kwargs, norm_with_torchs_variance(func, args, kwargs, split=self._spmd))
        else:
            if func is _Tensor.__setitem__ and is_write_by_mask(*args):
                func = write_where_
            elif func is torch.arange:
                # It would read the numbers inside C++.
                args = tuple(
                    self._call(_Tensor.item, (value,), {}) if _is_on_device(value) else value for value in args
                )
            result = self._check_dynamic(func, args, kwargs)
            if result is not NO_RESULT:
                return result
            if func in _EMBEDDINGS and _renorms(func, args, kwargs):
                self.undo_log.record(args[1], written_through=True)
            if self._is_write(func, kwargs):
                self._record_writes(args, kwargs, written_through=func in _WRITE_THROUGH)
                written = self._indices.written(func, args, kwargs)
                if written is not None:
                    result = self._noted(called, args, kwargs, func(*args, **kwargs))
                    written(result)
                    return result
            else:
                self._record_leaves(args)
                if kwargs:
                    self._record_leaves(kwargs.values())
        return self._noted(called, args, kwargs, func(*args, **kwargs))

    def _check_dynamic(self, func: _CALL, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Reports a call whose result has a shape that depends on values; returns the result that a library gets."""
        dynamic = self._dynamic(func, args, kwargs)
        if dynamic is None:
            return NO_RESULT
        result = NO_RESULT
        if self._allowed_reads is not None:
            index = self._allowed_reads.positions(func, args[0], args[1]) if func in _INDEXING else None
            if index is not None:
                with self:
                    return func(args[0], index, *args[2:])
            if func in _MASKED_SELECT:
                return self._select(*args, **kwargs)
            result = self._allowed_reads.dynamic(func, args, kwargs, *dynamic)
        if result is NO_RESULT:
            self._on_dynamic(*dynamic)
        return result

    def _select(self, input: torch.Tensor, mask: torch.Tensor) -> Any:
        """As `torch.masked_select`, by an index: of that it may be known what it selects."""
        shape = torch.broadcast_shapes(input.shape, mask.shape)
        with self:
            return input.expand(shape)[mask.expand(shape)]

    def _is_write(self, func: _CALL, kwargs: dict[str, Any]) -> bool:
        """Whether a call writes to one of its arguments."""
        writes = self._writes.get(func)
        if writes is None:
            writes = self._writes[func] = writes_in_place(func)
        return writes or kwargs.get("out") is not None or bool(kwargs.get("inplace"))

    def _noted(self, func: _CALL, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
        self._operations.call(func, args, kwargs, result)
        self._follow(func, args, kwargs, result)
        return result

    def _backward(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Runs the autograd engine with this mode on; torch switches it off inside a call that it intercepted."""
        self.undo_log.record_enclosing_leaves()
        self._operations.call(_Tensor.backward, (tensor, *args), kwargs, None)
        if type(tensor) is not _Tensor:
            return _Tensor.backward(tensor, *args, **kwargs)  # type: ignore[no-untyped-call]
        if "gradient" in kwargs:
            # The method and the function have different names for this argument.
            kwargs["grad_tensors"] = kwargs.pop("gradient")
        SPANS.begin(BACKWARD)
        with self:
            torch.autograd.backward(tensor, *args, **kwargs)
        SPANS.end(BACKWARD)
        return None

    def _dynamic(self, func: _CALL, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, torch.Tensor] | None:
        """The name of an operation whose result has no fixed shape, with the tensor it depends on; None for others."""
        if func in DYNAMIC:
            name, looked_into = DYNAMIC[func], args[0]
        elif func in _INDEXING:
            name = "a boolean index"
            looked_into = _mask_in(args[1])
        elif func in _REPEATS and kwargs.get("output_size") is None:
            name = "repeat_interleave without output_size"
            looked_into = kwargs.get("repeats", args[1] if len(args) > 1 else args[0])
        elif func is torch.where and len(args) == 1 and not kwargs:
            name, looked_into = "torch.where with one argument", args[0]
        else:
            return None
        if isinstance(looked_into, _Tensor) and looked_into.device.type == self._type:
            return name, looked_into
        return None

    def _check_move(self, func: _CALL, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tensor = args[0]
        if func is _Tensor.copy_:
            source = args[1] if len(args) > 1 else kwargs.get("src")
            if isinstance(source, _Tensor) and source.device.type == self._type and tensor.device.type != self._type:
                self._on_read("copy_ to the host", source)
            self.undo_log.record(tensor, written_through=True)
            return
        if tensor.device.type != self._type:
            return
        for target in (*args[1:], *kwargs.values()):
            if isinstance(target, _Tensor):
                to_host = target.device.type == "cpu"
            elif isinstance(target, torch.device):
                to_host = target.type == "cpu"
            elif isinstance(target, str):
                to_host = target.startswith("cpu") or (target.startswith("torch.") and f".{self._type}." not in target)
            else:
                # Classes such as torch.FloatTensor, which `.type()` takes.
                to_host = isinstance(target, type) and func is _Tensor.type
            if to_host:
                self._on_read(".to('cpu')", tensor)
                return

    def _record_writes(self, args: Iterable[Any], kwargs: dict[str, Any], *, written_through: bool) -> None:
        for value in (*args, *kwargs.values()):
            if isinstance(value, _Tensor):
                self.undo_log.record(value, written_through=written_through)
            elif isinstance(value, (list, tuple)):
                self._record_writes(value, {}, written_through=written_through)

    def _record_leaves(self, args: Iterable[Any]) -> None:
        for value in args:
            if isinstance(value, _Tensor):
                if value.requires_grad and value.is_leaf:
                    self.undo_log.record_leaf(value)
            elif isinstance(value, (list, tuple)):
                self._record_leaves(value)

    def detach(self) -> None:
        """Removes the mode from the thread's stack of modes, wherever it is in it.

        It is in the stack twice if Ctrl-C came while a backward was leaving it.
        """
        leave_function_mode(self)

    def pass_on(self) -> None:
        """Passes calls on from now on: the step has ended in one of them, and torch enters its mode again after it.

        The next step's mode removes it.
        """
        self.passes_on = True
        vars(self)["__torch_function__"] = MethodType(_pass_on, self)
        _passing.append(self)


_passing: list[StepMode] = []


def _pass_on(
    mode: StepMode, func: _CALL, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
) -> Any:
    return func(*args, **(kwargs or {}))


def _is_about_devices(error: RuntimeError) -> bool:
    """Whether torch or torch_xla has refused tensors of several devices."""
    return not isinstance(error, XLAAdapterError) and any(word in str(error) for word in ("XLA tensor", "device"))


def _is_on_device(value: Any) -> bool:
    device = getattr(value, "device", None)
    return device is not None and device.type == device_type()


def is_list_of_device_scalars(data: Any) -> bool:
    """Whether these are tensors of no dimension, some of them on the device."""
    return (
        isinstance(data, (list, tuple))
        and all(isinstance(item, _Tensor) and item.ndim == 0 for item in data)
        and any(item.device.type == device_type() for item in data)
    )


def stacked_scalars(scalars: Any, *, dtype: torch.dtype | None = None, device: Any = None, **_: Any) -> torch.Tensor:
    """As `torch.tensor(scalars)`, on the device and without a read."""
    device_of_scalars = next(scalar.device for scalar in scalars if scalar.device.type == device_type())
    stacked = torch.stack([scalar.detach().to(device_of_scalars) for scalar in scalars])
    return stacked if dtype is None else stacked.to(dtype)


def _mask_in(index: Any) -> torch.Tensor | None:
    for part in index if isinstance(index, tuple) else (index,):
        if isinstance(part, _Tensor) and part.dtype in _MASKS:
            return part
    return None
