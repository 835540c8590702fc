"""`Answers`: answers the reads of known libraries in one step without a break of its graph, where that is possible."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

import torch

from xla_adapters.runtime import Runtime
from xla_adapters.runtime.transfers import note_upload
from xla_adapters.tracing.deferred_numbers import DeferredNumbers
from xla_adapters.tracing.host_values import HostValue
from xla_adapters.tracing.library_reads import LibraryReads, MaskedSelection, with_selections
from xla_adapters.tracing.reads_on_host import ReadsOnHost
from xla_adapters.utils.nested_values import replaced
from xla_adapters.utils.torch_modes import device_type

_Tensor = torch.Tensor
_CALL = Callable[..., Any]
NO_ANSWER: Final = object()
_UPLOADS = frozenset({_Tensor.to, torch.tensor, torch.as_tensor, torch.scalar_tensor})


class Breaks(Protocol):
    """What handles a read that has no answer; `GraphBreaks` does."""

    found: bool

    def on_read(self, what: str, tensor: torch.Tensor) -> None:
        """A value is about to be read on the host."""

    def on_dynamic(self, what: str, tensor: torch.Tensor) -> None:
        """An operation is about to be called whose result has a shape that depends on the tensor's values."""


class Answers:
    """Answers reads in one step.

    - A value that the integers of the batch determine is computed on the host: at once, exactly.
    - Other numbers that `.item()` reads are deferred until after the step; see `DeferredNumber`.
    - Everything else decides what the library does next: the step is executed in two parts.

    Args:
        reads: which libraries' reads are answered.
        breaks: handles all other reads.
        runtime: the runtime.

    Attributes:
        deferred: the numbers that are read after the step.
        on_host: notes what is read on the host; None if the step will not be replayed. Then each answer counts as a
            break (`breaks.found`), because a replay would take what this batch has for that of every batch.
    """

    def __init__(self, reads: LibraryReads, breaks: Breaks, runtime: Runtime) -> None:
        self._reads = reads
        self._breaks = breaks
        self._runtime = runtime
        self.on_host: ReadsOnHost | None = None
        self.deferred = DeferredNumbers(
            runtime, lambda tensor: breaks.on_read("a number that the step has not computed yet", tensor)
        )

    def copied(self, source: HostValue) -> torch.Tensor:
        """The value of a tensor that was copied to the device."""
        return self._reads.host_values.copied(source)

    def note_reads(self) -> None:
        """Notes how the answers depend on the batch, for replays of the step. Whoever reads must keep the numbers."""
        self.on_host = ReadsOnHost(self._reads.host_values)

    def read(self, function: _CALL, what: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """The result of a call that reads the value of a tensor; `NO_ANSWER` if it is not a library's."""
        if not self._reads.is_asked():
            return NO_ANSWER
        tensor, values = args[0], self._reads.host_values
        known = values.find(tensor)
        logs = self._reads.reader() is not None
        if known is not None and not any(isinstance(value, _Tensor) for value in (*args[1:], *kwargs.values())):
            if logs and self.on_host is not None:
                return self.on_host.read(function, known, args[1:], kwargs)
            self._breaks.found = True
            with torch.no_grad(), torch._C.DisableTorchFunction():
                # A copy, because the caller may write into it.
                return function(values.value(known).clone(), *args[1:], **kwargs)
        if not logs:
            return NO_ANSWER
        if function is _Tensor.item and tensor.numel() == 1:
            self._breaks.found |= self.on_host is None
            return self.deferred.read(tensor)
        self._breaks.on_read(what, tensor)
        return self._executing(function, args, kwargs)

    def dynamic(
        self, function: _CALL, args: Sequence[Any], kwargs: dict[str, Any], what: str, tensor: torch.Tensor
    ) -> Any:
        """The result of a call whose shape depends on values; `NO_ANSWER` if it is not a library's.

        Args:
            function: what is called.
            args: its arguments.
            kwargs: its keyword arguments.
            what: the call, as the user knows it.
            tensor: whose values the shape depends on.
        """
        if not self._reads.is_asked():
            return NO_ANSWER
        selects = function is _Tensor.__getitem__ and _is_mask(args[0], args[1])
        values = self._reads.host_values
        computation = values.call(function, args, kwargs)
        is_known = computation is not None or (selects and values.find(args[1]) is not None)
        logs = self._reads.reader() is not None
        if not is_known and not logs:
            return NO_ANSWER
        self._breaks.found |= self.on_host is None or not logs
        if computation is not None:
            return self._uploaded(computation)
        if selects and not logs:
            return self._select(args[0], args[1])
        if selects:
            mask = args[1].clone()
            values.note(torch.clone, (args[1],), {}, mask)
            # A copy of the values too: the library may change them before it uses what it selected.
            return MaskedSelection(args[0].clone(), mask, self._select)
        self._breaks.on_dynamic(what, tensor)
        return self._executing(function, args, kwargs)

    def note(self, function: _CALL, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> None:
        """A function was called in the step: remembers what the host knows of its result."""
        values = self._reads.host_values
        if function not in _UPLOADS or not isinstance(result, _Tensor) or result.device.type != device_type():
            values.note(function, args, kwargs, result)
            return
        source = args[0] if args else kwargs.get("data")
        if isinstance(source, _Tensor):
            if source.device.type == "cpu":
                note_upload(source, result)
            else:
                values.note(function, args, kwargs, result)
        elif isinstance(source, (bool, int)):
            with torch._C.DisableTorchFunction():
                note_upload(torch.tensor(source), result)

    def _select(self, values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """`values[mask]`."""
        indices = self._reads.host_values.call(torch.nonzero, (mask,), {"as_tuple": True})
        if indices is not None:
            return values[self._uploaded(indices)]
        self._breaks.on_dynamic("a boolean index", mask)
        selected: torch.Tensor = self._executing(_Tensor.__getitem__, (values, mask), {})
        return selected

    def _uploaded(self, computation: HostValue) -> Any:
        def upload(tensor: torch.Tensor) -> torch.Tensor:
            on_device = self._runtime.transfers.to_device(tensor)
            note_upload(tensor, on_device)
            return on_device

        on_host = self._reads.host_values.value(computation)
        with torch._C.DisableTorchFunction():
            if self.on_host is not None and isinstance(on_host, _Tensor):
                return self.on_host.uploaded(computation, upload)
            self._breaks.found = True
            return replaced(on_host, upload)

    def _executing(self, function: _CALL, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Calls a function that may execute what it needs."""
        allowed = self._runtime.tracing.execution_allowed()
        self._runtime.tracing.set_execution_allowed(True)
        try:
            # A selection may be called outside of the step's mode, which would make another one of it.
            with torch._C.DisableTorchFunction():
                return function(*with_selections(args), **with_selections(kwargs))
        finally:
            self._runtime.tracing.set_execution_allowed(allowed)


def _is_mask(values: torch.Tensor, index: Any) -> bool:
    return (
        isinstance(index, _Tensor)
        and index.dtype is torch.bool
        and values.device.type == device_type()
        and index.shape == values.shape[: index.ndim]
    )
