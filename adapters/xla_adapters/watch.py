"""`StepWatch`: sees every torch call inside a step, to catch reads and to journal writes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from xla_adapters.backend import get_backend
from xla_adapters.convolutions import CONVOLUTIONS
from xla_adapters.dropout import Dropout
from xla_adapters.layer_norms import layer_norms
from xla_adapters.lowerings import LOWERINGS, norm_with_torchs_variance
from xla_adapters.rollback import StepJournal
from xla_adapters.sharding.attention import ATTENTION
from xla_adapters.sharding.norms import NORMS
from xla_adapters.torch_modes import leave_function_mode
from xla_adapters.transfers import upload_scalar

_Tensor = torch.Tensor
_CALL = Callable[..., Any]

_ON_CPU = {**LOWERINGS, **CONVOLUTIONS}

# Calls that need the value of a tensor on the host, whatever their other arguments.
_READS: dict[_CALL, str] = {
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
# Operations whose result has a shape that depends on values.
_DYNAMIC: dict[_CALL, str] = {
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
_REPEATS: frozenset[_CALL] = frozenset({_Tensor.repeat_interleave, torch.repeat_interleave})
_MASKS = (torch.bool, torch.uint8)
# Calls that read only if they move a tensor from the device to the host.
_MOVES: frozenset[_CALL] = frozenset({_Tensor.to, _Tensor.copy_, _Tensor.type})
# Calls that make a tensor of Python numbers, or of tensors of one element.
_FROM_NUMBERS: frozenset[_CALL] = frozenset({torch.tensor, torch.as_tensor, torch.scalar_tensor})
# Calls that write some of their arguments in place without saying so in their name.
_HIDDEN_WRITES: frozenset[_CALL] = frozenset({_Tensor.data.__set__, _Tensor.__setitem__})  # type: ignore[attr-defined]
# Of those that write: the ones that may change the value itself (see `PJRTBackend.twin`); batch norm is another.
_WRITE_THROUGH: frozenset[_CALL] = frozenset({_Tensor.__setitem__, torch._foreach_copy_})
_NORMS: frozenset[_CALL] = frozenset(
    {torch.batch_norm, torch.instance_norm, torch.nn.functional.batch_norm, torch.nn.functional.instance_norm}
)


def _writes_in_place(function: _CALL) -> bool:
    if function in _HIDDEN_WRITES:
        return True
    name = getattr(function, "__name__", "")
    if name.startswith("__"):
        return name.startswith("__i") and name not in ("__index__", "__int__", "__iter__", "__invert__", "__init__")
    return name.endswith("_")


class StepWatch(TorchFunctionMode):
    """Reports reads to `on_read` and keeps the journal up to date while it is active.

    Only calls made from Python are seen; what happens inside C++ (the engine's accumulation of
    gradients, a read inside an operator) is covered by the journal's record of the leaves and by
    the backend's refusal to execute.
    """

    def __init__(
        self,
        journal: StepJournal,
        on_read: Callable[[str, torch.Tensor], None],
        on_dynamic: Callable[[str, torch.Tensor], None],
    ) -> None:
        super().__init__()
        self.journal = journal
        self._on_read = on_read
        self._on_dynamic = on_dynamic
        self._writes: dict[_CALL, bool] = {}
        backend = get_backend()
        self._spmd = backend.is_spmd()
        self._lowerings = LOWERINGS
        if self._spmd:
            self._lowerings = {**LOWERINGS, **NORMS, **ATTENTION}
        elif backend.hardware() == "CPU":
            self._lowerings = {**_ON_CPU, **layer_norms(backend)}
            if backend.random_algorithm() == "three_fry":
                self._lowerings |= Dropout(backend).lowerings()

    def __torch_function__(
        self, func: _CALL, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in self._lowerings and args and args[0].device.type == "xla":
            func = self._lowerings[func]
        if func in _READS:
            if args[0].device.type == "xla":
                self._on_read(_READS[func], args[0])
        elif func is _Tensor.backward:
            return self._backward(*args, **kwargs)
        elif func in _MOVES:
            self._check_move(func, args, kwargs)
            if func is _Tensor.to:
                return upload_scalar(func, args, kwargs)
        elif func in _FROM_NUMBERS:
            if args and _is_list_of_device_scalars(args[0]):
                return _stack(args[0], **kwargs)
            return upload_scalar(func, args, kwargs)
        elif func in _NORMS:
            self._journal_leaves((*args, *kwargs.values()))
            for value in (*args[1:], *kwargs.values()):
                if isinstance(value, _Tensor) and not value.requires_grad:
                    self.journal.record(value, written_through=True)
            return norm_with_torchs_variance(func, args, kwargs, split=self._spmd)
        else:
            if func is _Tensor.__setitem__ and _sets_number_by_mask(args):
                # The same, without looking how many elements it is.
                mask = args[1].reshape(*args[1].shape, *[1] * (args[0].ndim - args[1].ndim))
                func, args = _Tensor.masked_fill_, (args[0], mask, args[2])
            dynamic = self._dynamic(func, args, kwargs)
            if dynamic is not None:
                self._on_dynamic(*dynamic)
            writes = self._writes.get(func)
            if writes is None:
                writes = self._writes[func] = _writes_in_place(func)
            if writes or "out" in kwargs or kwargs.get("inplace"):
                self._journal_writes(args, kwargs, written_through=func in _WRITE_THROUGH)
            else:
                self._journal_leaves(args)
                if kwargs:
                    self._journal_leaves(kwargs.values())
        return func(*args, **kwargs)

    def _backward(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Runs the engine with the watch on, which torch switches off inside a call it has reported."""
        self.journal.record_enclosing_leaves()
        if type(tensor) is not _Tensor:
            return _Tensor.backward(tensor, *args, **kwargs)  # type: ignore[no-untyped-call]
        if "gradient" in kwargs:
            # The method's name for what the engine calls grad_tensors.
            kwargs["grad_tensors"] = kwargs.pop("gradient")
        with self:
            return torch.autograd.backward(tensor, *args, **kwargs)

    def _dynamic(self, func: _CALL, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, torch.Tensor] | None:
        """The operation and the tensor it must look into, if its result has no fixed shape."""
        if func in _DYNAMIC:
            name, looked_into = _DYNAMIC[func], args[0]
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
        if isinstance(looked_into, _Tensor) and looked_into.device.type == "xla":
            return name, looked_into
        return None

    def _check_move(self, func: _CALL, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tensor = args[0]
        if func is _Tensor.copy_:
            source = args[1] if len(args) > 1 else kwargs.get("src")
            if isinstance(source, _Tensor) and source.device.type == "xla" and tensor.device.type != "xla":
                self._on_read("copy_ to the host", source)
            self.journal.record(tensor, written_through=True)
            return
        if tensor.device.type != "xla":
            return
        for target in (*args[1:], *kwargs.values()):
            if isinstance(target, _Tensor):
                to_host = target.device.type == "cpu"
            elif isinstance(target, torch.device):
                to_host = target.type == "cpu"
            elif isinstance(target, str):
                to_host = target.startswith("cpu") or (target.startswith("torch.") and ".xla." not in target)
            else:
                # torch.FloatTensor and its kin, which `.type()` takes.
                to_host = isinstance(target, type) and func is _Tensor.type
            if to_host:
                self._on_read(".to('cpu')", tensor)
                return

    def _journal_writes(self, args: Iterable[Any], kwargs: dict[str, Any], *, written_through: bool) -> None:
        for value in (*args, *kwargs.values()):
            if isinstance(value, _Tensor):
                self.journal.record(value, written_through=written_through)
            elif isinstance(value, (list, tuple)):
                self._journal_writes(value, {}, written_through=written_through)

    def _journal_leaves(self, args: Iterable[Any]) -> None:
        for value in args:
            if isinstance(value, _Tensor):
                if value.requires_grad and value.is_leaf:
                    self.journal.record_leaf(value)
            elif isinstance(value, (list, tuple)):
                self._journal_leaves(value)

    def detach(self) -> None:
        """Leaves the mode, wherever it stands in the thread's stack of modes.

        It stands there twice where Ctrl-C came while a backward was leaving it.
        """
        leave_function_mode(self)


def _sets_number_by_mask(args: tuple[Any, ...]) -> bool:
    tensor, index, value = args
    if not (isinstance(tensor, _Tensor) and tensor.device.type == "xla"):
        return False
    if not (isinstance(index, _Tensor) and index.dtype is torch.bool and index.shape == tensor.shape[: index.ndim]):
        return False
    return isinstance(value, (bool, int, float)) or (
        isinstance(value, _Tensor) and value.ndim == 0 and value.device == tensor.device and value.dtype == tensor.dtype
    )


def _is_list_of_device_scalars(data: Any) -> bool:
    return (
        isinstance(data, (list, tuple))
        and all(isinstance(item, _Tensor) and item.ndim == 0 for item in data)
        and any(item.device.type == "xla" for item in data)
    )


def _stack(scalars: Any, *, dtype: torch.dtype | None = None, device: Any = None, **_: Any) -> torch.Tensor:
    """What `torch.tensor(list of scalars)` means, without reading them; the result stays on the device."""
    place = next(scalar.device for scalar in scalars if scalar.device.type == "xla")
    stacked = torch.stack([scalar.detach().to(place) for scalar in scalars])
    return stacked if dtype is None else stacked.to(dtype)


def _mask_in(index: Any) -> torch.Tensor | None:
    for part in index if isinstance(index, tuple) else (index,):
        if isinstance(part, _Tensor) and part.dtype in _MASKS:
            return part
    return None
