"""`HostValues`: what a step computes from the integers of its batch, known on the host without a read."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from xla_adapters.runtime.transfers import forget_upload, upload_of
from xla_adapters.utils.torch_modes import device_type

_Tensor = torch.Tensor
_CALL = Callable[..., Any]

# Functions of integers and booleans that compute the same on every device and change nothing, by name: a method and
# the function of torch have the same one.
_PURE = frozenset(
    name
    for names in (
        "eq ne lt le gt ge __eq__ __ne__ __lt__ __le__ __gt__ __ge__",
        "logical_and logical_or logical_not logical_xor bitwise_and bitwise_or bitwise_not bitwise_xor",
        "__and__ __or__ __xor__ __invert__ __rand__ __ror__ __rxor__",
        "add sub subtract rsub mul multiply neg negative abs clamp clamp_min clamp_max minimum maximum",
        "__add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __neg__ __abs__",
        "sum any all amax amin max min cumsum diff count_nonzero",
        "__getitem__ view reshape flatten squeeze unsqueeze expand expand_as chunk split unbind cat stack narrow",
        "select transpose permute t contiguous clone detach index_select gather masked_fill where",
        "to long int bool as_tensor pad",
    )
    for name in names.split()
)
# Functions whose result has a shape that depends on values: computed on the host, they need no break of the graph.
_DYNAMIC = frozenset(("nonzero", "argwhere", "masked_select", "__getitem__", "where", "bincount", "repeat_interleave"))
# With a dimension they also tell where: of equal values, devices name different ones.
_EXTREMES = frozenset({_Tensor.max, _Tensor.min, torch.max, torch.min})
_DATA: frozenset[_CALL] = frozenset({_Tensor.data.__get__})  # type: ignore[attr-defined]


class HostValue:
    """A tensor as the host would compute it, when it is asked for.

    Args:
        compute: computes it.
        version: of the tensor on the device when its value was this one.
        source: the only tensor of the batch that it is computed from; None if there are several.
    """

    __slots__ = ("_compute", "_value", "source", "version")

    def __init__(
        self, compute: Callable[[], torch.Tensor], version: int, source: weakref.ref[torch.Tensor] | None
    ) -> None:
        self._compute: Callable[[], torch.Tensor] | None = compute
        self._value: torch.Tensor | None = None
        self.version = version
        self.source = source

    def get(self) -> torch.Tensor:
        """The tensor on the host."""
        if self._value is None:
            assert self._compute is not None
            with torch.no_grad(), torch._C.DisableTorchFunction():
                self._value = self._compute()
            self._compute = None
        return self._value


class HostValues:
    """Follows integer and boolean tensors of the batch through the step.

    A value that the batch alone determines is the same on the host and on the device, if it is made of integers: no
    rounding. So it is computed on the host from the host's copy of the batch, if somebody asks for it.
    """

    def __init__(self) -> None:
        self._known = WeakTensorKeyDictionary()
        self._pure: dict[_CALL, bool] = {}

    def note(self, function: _CALL, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> None:
        """A function was called in the step: remembers how the host would compute its result, if it can."""
        pure = self._pure.get(function)
        if pure is None:
            pure = self._pure[function] = getattr(function, "__name__", "") in _PURE
        if function in _DATA:
            # Writes through `.data` do not change the version.
            self._known.pop(args[0], None)
            forget_upload(args[0])
        if not pure or (function in _EXTREMES and not isinstance(result, _Tensor)):
            return
        if isinstance(result, _Tensor):
            results: Sequence[Any] = (result,)
        elif isinstance(result, (tuple, list)):
            results = result
        else:
            return
        if not all(_is_exact(tensor) for tensor in results):
            return
        computation = self._computation(function, args, kwargs)
        if computation is None:
            return
        whole, source = _Once(computation), self._common_source(args, kwargs)
        with torch._C.DisableTorchFunction():
            for index, tensor in enumerate(results):
                part = whole.get if result is tensor else _Part(whole, index).get
                self._known[tensor] = HostValue(part, tensor._version, source)

    def get(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The value of a device tensor, on the host; None if it is not known there."""
        known = self._find(tensor)
        return None if known is None else known.get()

    def source(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The only tensor of the batch that a device tensor is computed from; None if there are several, or none."""
        known = self._find(tensor)
        return None if known is None or known.source is None else known.source()

    def call(self, function: _CALL, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """The result of a call whose shape depends on values, on the host; None if the host cannot compute it."""
        if getattr(function, "__name__", "") not in _DYNAMIC:
            return None
        computation = self._computation(function, args, kwargs)
        if computation is None:
            return None
        with torch.no_grad(), torch._C.DisableTorchFunction():
            return computation()

    def _find(self, tensor: torch.Tensor) -> HostValue | None:
        with torch._C.DisableTorchFunction():
            known: HostValue | None = self._known.get(tensor)
            if known is not None and known.version == tensor._version:
                return known
        upload = None if known is not None else upload_of(tensor)
        if upload is None:
            return None
        with torch._C.DisableTorchFunction():
            values = upload.values
            found = self._known[tensor] = HostValue(lambda: values, tensor._version, weakref.ref(tensor))
        return found

    def _common_source(self, args: Sequence[Any], kwargs: dict[str, Any]) -> weakref.ref[torch.Tensor] | None:
        known = [self._find(tensor) for tensor in _tensors((*args, *kwargs.values()))]
        sources = {None if value is None else value.source for value in known}
        return sources.pop() if len(sources) == 1 else None

    def _computation(self, function: _CALL, args: Sequence[Any], kwargs: dict[str, Any]) -> Callable[[], Any] | None:
        """The same call on the host; None if an argument is not known there, or none is a tensor."""
        known: dict[int, HostValue] = {}
        for tensor in _tensors((*args, *kwargs.values())):
            value = None if tensor.dtype.is_floating_point else self._find(tensor)
            if value is None:
                return None
            known[id(tensor)] = value
        if not known:
            return None
        # Without a reference to the tensors: each would become an output of the graph.
        args_later = [_held(value, known) for value in args]
        kwargs_later = {name: _held(value, known) for name, value in kwargs.items()}

        def compute() -> Any:
            return function(*map(_got, args_later), **{name: _got(value) for name, value in kwargs_later.items()})

        return compute


class _Once:
    """Computes something once.

    Args:
        compute: computes it.
    """

    def __init__(self, compute: Callable[[], Any]) -> None:
        self._compute = compute
        self._result: Any = None

    def get(self) -> Any:
        if self._result is None:
            self._result = self._compute()
        return self._result


class _Part:
    """One of several results.

    Args:
        whole: all of them.
        index: which one.
    """

    def __init__(self, whole: _Once, index: int) -> None:
        self._whole = whole
        self._index = index

    def get(self) -> torch.Tensor:
        part: torch.Tensor = self._whole.get()[self._index]
        return part


def _is_exact(value: Any) -> bool:
    return (
        isinstance(value, _Tensor)
        and value.device.type == device_type()
        and not value.dtype.is_floating_point
        and not value.dtype.is_complex
    )


def _tensors(values: Sequence[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, _Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _held(value: Any, known: dict[int, HostValue]) -> Any:
    if isinstance(value, _Tensor):
        return known[id(value)]
    if type(value) in (list, tuple):
        return type(value)(_held(item, known) for item in value)
    if isinstance(value, (str, torch.device)) and not isinstance(value, torch.dtype):
        return _device_on_host(value)
    return value


def _device_on_host(value: str | torch.device) -> str | torch.device:
    kind = value.type if isinstance(value, torch.device) else value.partition(":")[0]
    return "cpu" if kind == device_type() else value


def _got(value: Any) -> Any:
    if isinstance(value, HostValue):
        return value.get()
    if type(value) in (list, tuple):
        return type(value)(_got(item) for item in value)
    return value
