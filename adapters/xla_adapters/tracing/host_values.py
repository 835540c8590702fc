"""`HostValues`: what a step computes exactly from its batch and from shapes, known on the host without a read."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, MutableMapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from xla_adapters.runtime.transfers import forget_upload, is_of_batch, upload_of
from xla_adapters.utils.torch_modes import device_type, in_transform

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
        "div divide true_divide __truediv__ floor_divide __floordiv__ __rfloordiv__ remainder __mod__ __rmod__ repeat",
        "sum any all amax amin max min cumsum diff count_nonzero _is_all_true prod",
        "__getitem__ view reshape flatten squeeze unsqueeze expand expand_as chunk split unbind cat stack narrow",
        "view_as reshape_as select transpose permute t contiguous clone detach index_select gather masked_fill where",
        "to long int bool as_tensor pad roll flip",
    )
    for name in names.split()
)
# Those of them whose result has the values of their only tensor, some of them or all.
_SELECTING = frozenset(
    name
    for names in (
        "__getitem__ view reshape flatten squeeze unsqueeze expand expand_as chunk split unbind narrow select",
        "transpose permute t contiguous clone detach long pad roll flip",
    )
    for name in names.split()
)
# Functions that compute the same floating point numbers on every device. Comparisons of these are exact, too.
_EXACT_FOR_FLOATS = frozenset((_SELECTING - {"long", "pad"}) | {"to", "cat", "stack", "index_select"})
# Functions of one number whose rounding does not matter: what is read of it is the host's number, as on the CPU.
_ARITHMETIC = frozenset(
    ["add", "sub", "mul", "div", "true_divide", "__add__", "__sub__", "__mul__", "__truediv__", "clamp", "clamp_min"]
)
# Functions whose result has a shape that depends on values: computed on the host, they need no break of the graph.
_DYNAMIC = frozenset(
    (
        *("nonzero", "argwhere", "masked_select", "__getitem__", "where", "bincount", "repeat_interleave"),
        *("unique", "unique_consecutive"),
    )
)
# With a dimension they also tell where: of equal values, devices name different ones.
_EXTREMES = frozenset({_Tensor.max, _Tensor.min, torch.max, torch.min})
# What shapes and numbers of the program determine, by name: positions, and tensors of one value.
_FILLS = {"zeros": 0, "zeros_like": 0, "new_zeros": 0, "ones": 1, "ones_like": 1, "new_ones": 1}
_FULL = ("full", "full_like", "new_full")
# What takes nothing but the shape of its second argument, with what takes a shape.
_AS: dict[str, _CALL] = {"expand_as": _Tensor.expand, "view_as": _Tensor.view, "reshape_as": _Tensor.reshape}
_DATA: frozenset[_CALL] = frozenset({_Tensor.data.__get__})  # type: ignore[attr-defined]


class HostValue:
    """A tensor as the host would compute it. Equal only to itself.

    Args:
        made: the function that makes it, its arguments and its keyword arguments, with other `HostValue`s in the
            place of tensors; None for a tensor that was copied to the device.
        version: of the tensor on the device when its value was this one.
        tensor: the copy on the device; only without `made`.
        sources: the copies that it is computed from; none for what only shapes and numbers determine.
        selects: whether it has no other values than its only source and what was added as padding.
    """

    __slots__ = ("__weakref__", "_sources", "made", "selects", "tensor", "version")

    def __init__(
        self,
        made: tuple[_CALL, list[Any], dict[str, Any]] | None,
        version: int = 0,
        *,
        tensor: weakref.ref[torch.Tensor] | None = None,
        sources: frozenset[HostValue] = frozenset(),
        selects: bool = True,
    ) -> None:
        self.made = made
        self.version = version
        self.tensor = tensor
        self._sources = sources
        self.selects = selects

    @property
    def sources(self) -> frozenset[HostValue]:
        """The copies that it is computed from; itself, if it is one."""
        return frozenset((self,)) if self.made is None else self._sources

    def only_source(self) -> torch.Tensor | None:
        """The only tensor that it is computed from, on the device; None if there is not just one, or it is gone."""
        sources = [source.tensor for source in self.sources]
        return sources[0]() if len(sources) == 1 and sources[0] is not None else None

    def get(self, known: Known) -> Any:
        """The tensor on the host.

        Args:
            known: the values of all `sources`; gets those that are computed.
        """
        if self not in known:
            assert self.made is not None
            function, args, kwargs = self.made
            with torch.no_grad(), torch._C.DisableTorchFunction():
                known[self] = function(
                    *(_got(value, known) for value in args),
                    **{name: _got(value, known) for name, value in kwargs.items()},
                )
        return known[self]

    def form(self, names: Mapping[HostValue, Hashable]) -> Hashable:
        """Equal for two values that are computed in the same way.

        Args:
            names: of all `sources`.
        """
        if self.made is None:
            return names[self]
        function, args, kwargs = self.made
        options = [(name, _form(value, names)) for name, value in sorted(kwargs.items())]
        return function, _form(args, names), tuple(options)


Known: TypeAlias = MutableMapping[HostValue, Any]


class HostValues:
    """Follows integer and boolean tensors of the batch through the step.

    A value that the batch alone determines is the same on the host and on the device, if it is made of integers: no
    rounding. So it is computed on the host from the host's copy of the batch, if somebody asks for it. The same is true
    of comparisons of the batch's floating point numbers (which pictures are empty).

    Attributes:
        fetching: returns what fetches a tensor of floating point numbers of the batch from the device; None if that
            cannot be. Without it only those of which the host has a copy are followed.
    """

    def __init__(self) -> None:
        self.fetching: Callable[[torch.Tensor], Callable[[], torch.Tensor] | None] | None = None
        self._fetches: dict[HostValue, Callable[[], torch.Tensor]] = {}
        self._known = WeakTensorKeyDictionary()
        # Values of the batch and what is computed of it, as long as somebody may ask for them.
        self._computed: Known = weakref.WeakKeyDictionary()
        self._pure: dict[_CALL, bool] = {}
        self._makers: set[_CALL] = set()

    def note(self, function: _CALL, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> None:
        """A function was called in the step: remembers how the host would compute its result, if it can."""
        pure = self._pure.get(function)
        if pure is None:
            name = name_of(function)
            pure = self._pure[function] = name in _PURE
            if function is torch.arange or name in _FILLS or name in _FULL:
                self._makers.add(function)
        if function in _DATA:
            # Writes through `.data` do not change the version.
            self._known.pop(args[0], None)
            forget_upload(args[0])
        if not pure or (function in _EXTREMES and not isinstance(result, _Tensor)):
            if function in self._makers:
                self._note_made(function, args, kwargs, result)
            return
        if isinstance(result, _Tensor):
            results: Sequence[Any] = (result,)
        elif isinstance(result, (tuple, list)):
            results = result
        else:
            return
        name = name_of(function)
        is_exact = self._is_followed_float if name in _EXACT_FOR_FLOATS or _is_number(name, result) else _is_exact
        if not all(map(is_exact, results)):
            return
        whole = self.computation(function, args, kwargs)
        if whole is None:
            return
        with torch._C.DisableTorchFunction():
            for index, tensor in enumerate(results):
                made = whole.made if result is tensor else (operator.getitem, [whole, index], {})
                self._known[tensor] = HostValue(made, tensor._version, sources=whole.sources, selects=whole.selects)

    def _note_made(self, function: _CALL, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> None:
        """Remembers the integers that `torch.arange` and the like have made."""
        # Writes into what a transform has wrapped do not change its version.
        if not _is_exact(result) or "out" in kwargs or in_transform():
            return
        made: tuple[_CALL, list[Any], dict[str, Any]]
        if function is torch.arange:
            numbers = [*args, *(value for key, value in kwargs.items() if key in ("start", "end", "step"))]
            if not all(type(number) is int for number in numbers):
                return
            made = function, list(args), {**kwargs, "device": "cpu"}
        else:
            name = function.__name__
            value = _FILLS[name] if name in _FILLS else kwargs["fill_value"] if "fill_value" in kwargs else args[-1]
            if type(value) not in (int, bool):
                return
            made = torch.full, [tuple(result.shape), value], {"dtype": result.dtype}
        with torch._C.DisableTorchFunction():
            self._known[result] = HostValue(made, result._version, selects=False)

    def _is_followed_float(self, value: Any) -> bool:
        is_float = isinstance(value, _Tensor) and value.dtype.is_floating_point
        return _is_exact(value) or (is_float and self.fetching is not None and value.device.type == device_type())

    def get(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The value of a device tensor, on the host; None if it is not known there without fetching anything."""
        known = self.find(tensor)
        if known is None or not self._fetches.keys().isdisjoint(known.sources):
            return None
        value: torch.Tensor = known.get(self._computed)
        return value

    def fetch(self, computation: HostValue) -> None:
        """Fetches from the device what a value is computed from, if the host has no copy of it."""
        for source in computation.sources & self._fetches.keys():
            self._computed[source] = self._fetches.pop(source)()

    def end_step(self) -> None:
        """Nothing more is fetched. Drops the references to the batch."""
        self.fetching = None
        self._fetches.clear()

    def copied(self, source: HostValue) -> torch.Tensor:
        """The value of a tensor that was copied to the device."""
        value: torch.Tensor = self._computed[source]
        return value

    def call(self, function: _CALL, args: Sequence[Any], kwargs: dict[str, Any]) -> HostValue | None:
        """A call whose shape depends on values, as the host computes it; None if it cannot."""
        return self.computation(function, args, kwargs) if name_of(function) in _DYNAMIC else None

    def value(self, computation: HostValue) -> Any:
        """What the host computes in this step."""
        self.fetch(computation)
        return computation.get(self._computed)

    def follow(self, tensor: torch.Tensor, computation: HostValue) -> None:
        """A tensor was copied to the device that the host computes."""
        with torch._C.DisableTorchFunction():
            made, sources, selects = computation.made, computation.sources, computation.selects
            self._known[tensor] = HostValue(made, tensor._version, sources=sources, selects=selects)

    def written(self, function: _CALL, args: Sequence[Any], kwargs: dict[str, Any]) -> Callable[[Any], None] | None:
        """A function is about to write to its first argument.

        Returns:
            What to call afterwards with its result, if the host knows what the argument is then.
        """
        if not args or not _is_exact(args[0]):
            return None
        name = name_of(function)
        computation: HostValue | None = None
        if name in ("__setitem__", "write_where_"):
            computation = self.computation(_with_item, args, kwargs)
        else:
            pure = f"__{name[3:]}" if name.startswith("__i") else name[:-1]
            if pure in _PURE and hasattr(_Tensor, pure):
                computation = self.computation(_of_its_dtype, (getattr(_Tensor, pure), *args), kwargs)
        return None if computation is None else partial(self._follow_written, args[0], computation, self._part(args[0]))

    def _part(self, tensor: torch.Tensor) -> tuple[torch.Tensor, HostValue, Any] | None:
        """What a tensor is a part of: that tensor, its value, and the index of the part; None if that is not known."""
        known = self.find(tensor)
        if known is None or known.made is None or name_of(known.made[0]) != "__getitem__":
            return None
        with torch._C.DisableTorchFunction():
            whole, (value, index) = tensor._base, known.made[1]
            is_current = whole is not None and self._known.get(whole) is value and value.version == whole._version
        return (whole, value, index) if whole is not None and is_current else None

    def _follow_written(
        self,
        tensor: torch.Tensor,
        computation: HostValue,
        part: tuple[torch.Tensor, HostValue, Any] | None,
        result: Any,
    ) -> None:
        if part is not None:
            # What it is a part of is written, too.
            whole, value, index = part
            sources = value.sources | computation.sources
            made: tuple[_CALL, list[Any], dict[str, Any]] = _with_item, [value, index, computation], {}
            self.follow(whole, HostValue(made, sources=sources, selects=False))
        # A trace may return another tensor than the one it was given.
        for changed in (tensor, result):
            if _is_exact(changed):
                self.follow(changed, computation)

    def find(self, tensor: torch.Tensor) -> HostValue | None:
        """How the host computes a device tensor; None if it cannot."""
        with torch._C.DisableTorchFunction():
            known: HostValue | None = self._known.get(tensor)
            if known is not None and not all(one in self._computed or one in self._fetches for one in known.sources):
                # Nobody has asked for the values in the step that could have fetched them.
                known = None
            if known is not None and known.version == tensor._version:
                return known
        upload = None if known is not None else upload_of(tensor)
        fetch = None
        if upload is None:
            is_input = known is None and tensor.dtype.is_floating_point and is_of_batch(tensor)
            fetch = self.fetching(tensor) if is_input and self.fetching is not None else None
            if fetch is None:
                return None
        with torch._C.DisableTorchFunction():
            found = self._known[tensor] = HostValue(None, tensor._version, tensor=weakref.ref(tensor))
        if upload is not None:
            self._computed[found] = upload.values
        elif fetch is not None:
            self._fetches[found] = fetch
        return found

    def computation(self, function: _CALL, args: Sequence[Any], kwargs: dict[str, Any]) -> HostValue | None:
        """The same call on the host; None if an argument is not known there, or none is a tensor."""
        of_shape = _AS.get(name_of(function))
        if of_shape is not None and len(args) == 2:
            function, args = of_shape, (args[0], tuple(args[1].shape))
        known: dict[int, HostValue] = {}
        for tensor in _tensors((*args, *kwargs.values())):
            value = self.find(tensor)
            if value is None:
                return None
            known[id(tensor)] = value
        if not known:
            return None
        # Without a reference to the tensors: each would become an output of the graph.
        made = (
            function,
            [_held(value, known) for value in args],
            {name: _held(kwargs[name], known) for name in kwargs},
        )
        selects = len(known) == 1 and name_of(function) in _SELECTING
        return HostValue(
            made,
            sources=frozenset().union(*(value.sources for value in known.values())),
            selects=selects and all(value.selects for value in known.values()),
        )


def name_of(function: _CALL) -> str:
    """Its name; empty if it has none."""
    return getattr(function, "__name__", "")


def _is_number(name: str, result: Any) -> bool:
    return name in _ARITHMETIC and isinstance(result, _Tensor) and result.numel() == 1


def _with_item(tensor: torch.Tensor, index: Any, value: Any) -> torch.Tensor:
    """What `tensor[index] = value` makes of a tensor."""
    copy = tensor.clone()
    copy[index] = value
    return copy


def _of_its_dtype(function: _CALL, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """What a function in place makes of a tensor."""
    return function(tensor, *args, **kwargs).to(tensor.dtype)


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


def _got(value: Any, known: Known) -> Any:
    if isinstance(value, HostValue):
        return value.get(known)
    if type(value) in (list, tuple):
        return type(value)(_got(item, known) for item in value)
    return value


def _form(value: Any, names: Mapping[HostValue, Hashable]) -> Hashable:
    if isinstance(value, HostValue):
        return value.form(names)
    if type(value) in (list, tuple):
        return tuple(_form(item, names) for item in value)
    return repr(value)
