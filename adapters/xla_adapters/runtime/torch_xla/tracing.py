"""`XLATracing`: torch_xla's eager and lazy modes, and its pending graph."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from itertools import compress
from typing import Any

import torch
import torch_xla
import torch_xla.debug.profiler as xla_profiler

from xla_adapters.errors import UnsupportedOptionError
from xla_adapters.runtime.interface import Device, RuntimeEvent
from xla_adapters.runtime.traced_tensors import TracedTensors

_C = torch_xla._XLAC
_SYNC_CALLS = ("_xla_step_marker", "_xla_sync_multi", "_xla_sync_live_tensors")


class XLATracing:
    """`Tracing` on torch_xla's lazy tensors.

    Args:
        device: of the tensors.
    """

    def __init__(self, device: Device) -> None:
        self._device = device

    @cached_property
    def _device_name(self) -> str:
        return str(self._device.torch_device())

    # ---- modes -----------------------------------------------------------------------------------

    def eager(self) -> bool:
        """See `Tracing`."""
        return bool(_C._get_use_eager_mode())

    def set_eager(self, enabled: bool) -> None:
        """See `Tracing`."""
        _C._set_use_eager_mode(enabled)

    def execution_allowed(self) -> bool:
        """See `Tracing`."""
        return bool(_C._get_allow_execution())

    def set_execution_allowed(self, allowed: bool) -> None:
        """See `Tracing`."""
        _C._set_allow_execution(allowed)

    def is_forbidden_execution(self, error: BaseException) -> bool:
        """See `Tracing`."""
        return isinstance(error, RuntimeError) and "Unexpected execution happens inside" in str(error)

    def is_lost_value(self, error: BaseException) -> bool:
        """See `Tracing`."""
        return isinstance(error, RuntimeError) and has_neither(error)

    def graph_name(self) -> str:
        """See `Tracing`."""
        return str(_C._get_current_graph_name())

    def set_graph_name(self, name: str) -> None:
        """See `Tracing`."""
        _C._set_current_graph_name(name)

    def constant_scalars(self) -> bool:
        """See `Tracing`."""
        return bool(_C._get_xla_handle_special_scalars())

    def set_constant_scalars(self, enabled: bool) -> None:
        """See `Tracing`."""
        _C._set_xla_handle_special_scalars(enabled)

    # ---- the pending graph -----------------------------------------------------------------------

    def pending_count(self) -> int:
        """See `Tracing`."""
        try:
            return sum(_C._check_device_tensor_need_materialization(self._device_name))
        except RuntimeError as error:
            if not has_neither(error):
                raise
            return sum(self.is_pending(tensor) for tensor in self.live_tensors())

    def is_pending(self, tensor: torch.Tensor) -> bool:
        """See `Tracing`."""
        return self._any_pending([tensor])

    def are_pending(self, tensors: Sequence[torch.Tensor]) -> list[bool]:
        """See `Tracing`."""
        try:
            return list(_C._check_tensor_need_materialization(list(tensors)))
        except RuntimeError as error:
            if not has_neither(error):
                raise
            return list(map(self.is_pending, tensors))

    @staticmethod
    def _any_pending(tensors: Sequence[torch.Tensor]) -> bool:
        try:
            return any(_C._check_tensor_need_materialization(list(tensors)))
        except RuntimeError as error:
            if not has_neither(error):
                raise
            return True

    def live_tensors(self) -> list[torch.Tensor]:
        """See `Tracing`."""
        return live_tensors()

    def graph_hash(self, outputs: Sequence[torch.Tensor]) -> str:
        """See `Tracing`."""
        ordered = sorted(outputs, key=_C._xla_get_tensor_id)
        return bytes(_C._get_graph_hash(ordered)).hex()

    def flush(self) -> None:
        """See `Tracing`; unlike `torch_xla.sync`."""
        _C._xla_sync_live_tensors(self._device_name, [], False)

    def compute(self, tensors: Sequence[torch.Tensor]) -> None:
        """See `Tracing`. A tenth of what `flush` costs if none is pending."""
        if self._any_pending(tensors):
            self.flush()

    def finish_step(self) -> None:
        """See `Tracing`."""
        # Else a step could not stand inside an open `xp.Trace`.
        torch_xla.sync(reset_scope=False)

    def discard_pending(self) -> None:
        """See `Tracing`."""
        _C._clear_pending_irs(self._device_name)

    def begin_trace(self, traced: TracedTensors | None) -> None:
        """See `Tracing`."""
        raise UnsupportedOptionError("the runtime torch_xla has no placeholders")

    def optimization_barrier(self, tensors: Sequence[torch.Tensor], after: Sequence[torch.Tensor] = ()) -> None:
        """See `Tracing`; changes the values that it waits for, too."""
        tensors = [*tensors, *after]
        for tensor in tensors:
            bring_up_to_date(tensor)
        if tensors:
            _C._xla_optimization_barrier_([torch._from_functional_tensor(tensor) for tensor in tensors])

    def intercept(self, notify: Callable[[RuntimeEvent, object], bool]) -> AbstractContextManager[None]:
        """See `Tracing`."""
        return intercepted(notify)


def bring_up_to_date(tensor: torch.Tensor) -> None:
    """Applies what was written to views of a tensor."""
    if torch._is_functional_tensor(tensor):
        torch._sync(tensor)  # type: ignore[attr-defined,no-untyped-call]


def has_neither(error: RuntimeError) -> bool:
    """Whether torch_xla met a tensor without value and graph: a refused execution leaves one behind."""
    return any(text in str(error) for text in ("XLATensor without XLAData and IR", "tensor_data"))


# ---- calls of torch_xla's own API ------------------------------------------------------------------


@contextmanager
def intercepted(notify: Callable[[RuntimeEvent, object], bool]) -> Iterator[None]:
    """See `Tracing.intercept`."""

    def reporting(event: RuntimeEvent, call: Callable[..., Any]) -> Callable[..., Any]:
        def reported(*args: Any, **kwargs: Any) -> Any:
            return call(*args, **kwargs) if notify(event, args[0] if args else None) else None

        return reported

    patches: list[tuple[Any, str, RuntimeEvent]] = [(_C, name, RuntimeEvent.SYNC) for name in _SYNC_CALLS]
    patches.append((_C, "_xla_wait_device_ops", RuntimeEvent.WAIT))
    patches.append((xla_profiler.Trace, "__enter__", RuntimeEvent.PROFILER_ENTER))
    patches.append((xla_profiler.Trace, "__exit__", RuntimeEvent.PROFILER_EXIT))
    originals = [(owner, name, getattr(owner, name)) for owner, name, _ in patches]
    try:
        for owner, name, event in patches:
            setattr(owner, name, reporting(event, getattr(owner, name)))
        yield
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)


# ---- all tensors on the device that Python can reach ----------------------------------------------


def live_tensors() -> list[torch.Tensor]:
    """Every tensor on an XLA device that Python code can reach.

    Not those that wrap others, or have no value at all: dynamo keeps the fake tensors of what it compiled.
    """
    objects = gc.get_objects()
    # There may be millions: a look at each one's type, and no Python for those that are no tensors.
    kinds = {kind for kind in set(map(type, objects)) if issubclass(kind, torch.Tensor) and not _has_no_value(kind)}
    tensors: list[torch.Tensor] = list(compress(objects, map(kinds.__contains__, map(type, objects))))
    with torch._C.DisableTorchFunction():
        tensors = [tensor for tensor in tensors if _is_on_device(tensor)]
    return [tensor for tensor in tensors if _owned(tensor)]


def _owned(tensor: torch.Tensor) -> bool:
    """Whether it will live on. Others are being destroyed by other threads: with an owner they would be freed twice."""
    if not tensor._use_count():  # type: ignore[attr-defined]
        return False
    # Of a tensor that only C++ holds, this is the object that it will be seen as again: it must be owned.
    tensor._fix_weakref()  # type: ignore[attr-defined]
    return True


def _has_no_value(kind: type[torch.Tensor]) -> bool:
    return kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__


def _is_on_device(tensor: torch.Tensor) -> bool:
    try:
        return tensor.device.type == "xla"
    except RuntimeError as error:
        # An undefined tensor: what the garbage collector finds of one that is being taken apart.
        if "does not have a device" not in str(error):
            raise
        return False
