"""`AllowedReads`: reads that known libraries may make in a step, with results that need no break of its graph."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

import torch

from xla_adapters.runtime import Runtime
from xla_adapters.runtime.transfers import keep_floats, note_upload
from xla_adapters.tracing.deferred_numbers import DeferredNumber, DeferredNumbers
from xla_adapters.tracing.host_values import HostValue
from xla_adapters.tracing.library_reads import (
    LibraryReads,
    MaskedSelection,
    only_clamps,
    only_writes_where,
    value_that_passes,
    with_selections,
)
from xla_adapters.tracing.reads_on_host import ReadsOnHost
from xla_adapters.utils.nested_values import replaced
from xla_adapters.utils.torch_modes import device_type

_Tensor = torch.Tensor
_CALL = Callable[..., Any]
NO_RESULT: Final = object()
_FOR_MESSAGES = frozenset({_Tensor.__format__, _Tensor.__repr__})
# What is made of the tensor and its device, not of its values alone.
_OF_DEVICE = frozenset({_Tensor.__repr__, _Tensor.__reduce_ex__})
_UPLOADS = frozenset({_Tensor.to, torch.tensor, torch.as_tensor, torch.scalar_tensor})


class Breaks(Protocol):
    """What handles a read that has no result here; `GraphBreaks` does."""

    found: bool

    def ends(self) -> bool:
        """Ends the step if it may end here; returns whether it has ended."""

    def on_read(self, what: str, tensor: torch.Tensor) -> None:
        """A value is about to be read on the host."""

    def on_dynamic(self, what: str, tensor: torch.Tensor) -> None:
        """An operation is about to be called whose result has a shape that depends on the tensor's values."""


class AllowedReads:
    """Gives the reads of known libraries in one step their results.

    - A value that the integers of the batch determine is computed on the host: at once, exactly. A loop of a script may
      read these, too.
    - Other numbers that `.item()` reads are deferred until after the step; see `DeferredNumber`.
    - Everything else decides what the library does next: the step is executed in two parts.

    Args:
        reads: which libraries may read.
        breaks: handles all other reads.
        runtime: the runtime.

    Attributes:
        deferred: the numbers that are read after the step.
        noted: notes what is read on the host; None if the step will not be replayed. A result that is not noted
            counts as a break (`breaks.found`), because a replay would take what this batch has for that of every batch.
    """

    def __init__(self, reads: LibraryReads, breaks: Breaks, runtime: Runtime) -> None:
        self._reads = reads
        self._breaks = breaks
        self._runtime = runtime
        self.noted: ReadsOnHost | None = None
        self._keeps_numbers = False
        self.deferred = DeferredNumbers(
            runtime, lambda tensor: breaks.on_read("a number that the step has not computed yet", tensor), breaks.ends
        )
        reads.host_values.fetching = None if runtime.has_placeholders else self._fetching

    def _fetching(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor] | None:
        """What fetches a tensor of the batch from the device; None if the step has written to it."""
        if self._runtime.tracing.is_pending(tensor):
            return None
        with torch._C.DisableTorchFunction():
            # As it is now: the step may write to it later.
            value = self._runtime.values.snapshot(tensor)

        def fetch() -> torch.Tensor:
            # The host keeps the next ones.
            keep_floats(keeps=True)
            with torch._C.DisableTorchFunction():
                return self._runtime.transfers.to_host([value])[0]

        return fetch

    def on_host(self, function: _CALL, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of a library's function that computes tensors of the batch's integers, computed on the host.

        What it decides by the batch is then no part of the step's graph. If the host does not know all that it is
        given, it is called as it is.
        """
        computation = self._reads.host_values.computation(function, args, kwargs)
        if computation is None:
            return function(*args, **kwargs)
        try:
            result = self._reads.host_values.value(computation)
        except RuntimeError:
            # It uses what is on the device, too; otherwise the call raises the same.
            return function(*args, **kwargs)
        parts = result if type(result) is tuple else (result,)
        if not all(part is None or (isinstance(part, _Tensor) and part.device.type == "cpu") for part in parts):
            return function(*args, **kwargs)
        if type(result) is not tuple:
            return self._copied(computation)
        sources = computation.sources
        made = [HostValue((operator.getitem, [computation, at], {}), sources=sources) for at in range(len(parts))]
        return tuple(None if part is None else self._copied(one) for part, one in zip(parts, made, strict=True))

    def _copied(self, computation: HostValue) -> torch.Tensor:
        """What the host computes, on the device, as a value of the step: a model may store it."""
        copy: torch.Tensor = self._uploaded(computation)
        # Not a clone: it would be what was copied.
        return torch.cat([copy]) if copy.ndim else copy

    def copied(self, source: HostValue) -> torch.Tensor:
        """The value of a tensor that was copied to the device."""
        return self._reads.host_values.copied(source)

    def note_reads(self, *, keeps_numbers: bool) -> None:
        """Notes how the results depend on the batch, for replays of the step.

        Args:
            keeps_numbers: whether the numbers that are read for logs are among what the step returns. Otherwise a step
                with such a read is not replayed.
        """
        self.noted = ReadsOnHost(self._reads.host_values)
        self._keeps_numbers = keeps_numbers

    def _notes(self, *, logs: bool) -> ReadsOnHost | None:
        """What notes a result; None if it is not noted.

        Args:
            logs: whether the library reads in order to log.
        """
        return self.noted if self._keeps_numbers or not logs else None

    def read(self, function: _CALL, what: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """The result of a call that reads the value of a tensor; `NO_RESULT` if it is not a library's."""
        if not self._reads.is_asked():
            return self._of_script(function, args, kwargs) if self._reads.of_script else NO_RESULT
        tensor, values = args[0], self._reads.host_values
        logs = self._reads.reader() is not None
        # A floating point number that is logged is deferred.
        known = None if logs and tensor.is_floating_point() else values.find(tensor)
        if known is not None and not any(isinstance(value, _Tensor) for value in (*args[1:], *kwargs.values())):
            noted = self._notes(logs=logs)
            if noted is not None:
                read = noted.read(function, known, args[1:], kwargs)
                # What a layer reads decides what it computes: at once, it may ask for the type.
                return read.value() if isinstance(read, DeferredNumber) and not logs else read
            self._breaks.found = True
            with torch.no_grad(), torch._C.DisableTorchFunction():
                # A copy, because the caller may write into it.
                return function(values.value(known).clone(), *args[1:], **kwargs)
        if not logs:
            return self._unknown_to_layers(function, tensor)
        if function is _Tensor.item and tensor.numel() == 1:
            self._breaks.found |= self._notes(logs=True) is None
            return self.deferred.read(tensor)
        self._breaks.on_read(what, tensor)
        return self._executing(function, args, kwargs)

    def _of_script(self, function: _CALL, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """What the code of a loop reads; `NO_RESULT` if the host does not know it, and it cannot wait for the end."""
        tensor, values = args[0], self._reads.host_values
        with_others = any(isinstance(value, _Tensor) for value in (*args[1:], *kwargs.values()))
        of_device = function in _OF_DEVICE or (function is _Tensor.__format__ and tensor.ndim)
        known = None if tensor.is_floating_point() or with_others or of_device else values.find(tensor)
        if known is not None:
            self._breaks.found = True
            with torch.no_grad(), torch._C.DisableTorchFunction():
                return function(values.value(known).clone(), *args[1:], **kwargs)
        # With stand-ins a number that is read has no place in the step's program.
        defers = function is _Tensor.item and tensor.numel() == 1 and not self._runtime.has_placeholders
        return NO_RESULT if not defers or self._breaks.ends() else self.deferred.read(tensor)

    def _unknown_to_layers(self, function: _CALL, tensor: torch.Tensor) -> Any:
        """What layers read that the host does not know; `NO_RESULT` unless it is for a message, a check, or nothing."""
        if function in _FOR_MESSAGES:
            return f"(a tensor of the step, {tuple(tensor.shape)}, {tensor.dtype})"
        frame = self._reads.reading_frame()
        if frame is None or function not in (_Tensor.__bool__, _Tensor.item) or tensor.dtype is not torch.bool:
            return NO_RESULT
        if only_clamps(frame):
            return False
        if only_writes_where(frame):
            return True
        passing = value_that_passes(frame)
        if passing is None:
            return NO_RESULT
        # Replays look at no checks.
        self._breaks.found = True
        self.deferred.expect(tensor, passing, f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}")
        return passing

    def dynamic(
        self, function: _CALL, args: Sequence[Any], kwargs: dict[str, Any], what: str, tensor: torch.Tensor
    ) -> Any:
        """The result of a call whose shape depends on values; `NO_RESULT` if it is not a library's.

        Args:
            function: what is called.
            args: its arguments.
            kwargs: its keyword arguments.
            what: the call, as the user knows it.
            tensor: whose values the shape depends on.
        """
        if not self._reads.is_asked():
            return NO_RESULT
        values = self._reads.host_values
        logs = self._reads.reader() is not None
        of_floats = any(isinstance(value, _Tensor) and value.is_floating_point() for value in args)
        computation = None if logs and of_floats else values.call(function, args, kwargs)
        if computation is None and not logs:
            return NO_RESULT
        self._breaks.found |= self._notes(logs=logs) is None
        if computation is not None:
            return self._uploaded(computation)
        if function is _Tensor.__getitem__ and _is_mask(args[0], args[1]):
            mask = args[1].clone()
            values.note(torch.clone, (args[1],), {}, mask)
            # A copy of the values too: the library may change them before it uses what it selected.
            return MaskedSelection(args[0].clone(), mask, self._select)
        self._breaks.on_dynamic(what, tensor)
        return self._executing(function, args, kwargs)

    def positions(self, function: _CALL, values: torch.Tensor, index: Any) -> tuple[Any, ...] | None:
        """An index with positions in the place of its masks; None if the host does not know all of them.

        Args:
            function: gets or sets what is at the index. What a library selects in order to log is selected later, and
                what the host knows is selected there.
            values: what is indexed.
            index: as `Tensor.__getitem__` takes it.
        """
        gets = function is _Tensor.__getitem__
        if not self._reads.is_asked() or (gets and self._reads.reader() is not None):
            return None
        if gets and self._reads.host_values.call(function, (values, index), {}) is not None:
            return None
        found: list[Any] = []
        dim = 0
        for part in index if isinstance(index, tuple) else (index,):
            if isinstance(part, _Tensor) and part.dtype is torch.bool and part.ndim:
                known = self._reads.host_values.call(torch.nonzero, (part,), {})
                if known is None or part.shape != values.shape[dim : dim + part.ndim]:
                    return None
                found.append(known)
                dim += part.ndim
            elif type(part) in (int, slice) or (isinstance(part, _Tensor) and part.dtype is torch.int64):
                found.append(part)
                dim += 1
            else:
                return None
        self._breaks.found |= self._notes(logs=self._reads.reader() is not None) is None
        uploaded = [self._uploaded(part).unbind(1) if isinstance(part, HostValue) else (part,) for part in found]
        return tuple(part for parts in uploaded for part in parts)

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
        elif _is_plain(source):
            with torch._C.DisableTorchFunction():
                note_upload(torch.tensor(source, dtype=result.dtype), result, of_numbers=True)

    def _select(self, values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """`values[mask]`."""
        indices = self._reads.host_values.call(torch.nonzero, (mask,), {})
        if indices is not None:
            return values[self._uploaded(indices).unbind(1)]
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
            if self.noted is not None and isinstance(on_host, _Tensor):
                return self.noted.uploaded(computation, upload)
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


def _is_plain(value: Any) -> bool:
    """Whether it is a number, or a list of such."""
    return all(map(_is_plain, value)) if type(value) in (list, tuple) else type(value) in (bool, int, float)


def _is_mask(values: torch.Tensor, index: Any) -> bool:
    return (
        isinstance(index, _Tensor)
        and index.dtype is torch.bool
        and values.device.type == device_type()
        and index.shape == values.shape[: index.ndim]
    )
