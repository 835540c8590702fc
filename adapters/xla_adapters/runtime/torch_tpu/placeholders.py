"""`TPUPlaceholders`: traces and compiles with the internal functions of TorchTPU's `torch.compile` backend."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch_tpu._internal.compile import tpu_torch_compile as _compiler
from torch_tpu._internal.execution_mode import execution_mode_impl as _modes
from torch_tpu._internal.sync import sync as _sync

from xla_adapters.runtime.interface import Device
from xla_adapters.runtime.interface.placeholders import Run
from xla_adapters.runtime.torch_tpu.counters import TPUCounters
from xla_adapters.runtime.torch_tpu.operators import sharing_copies

_RECORD = _modes._EagerMode.INTERNAL_COMPILE_FX_GRAPH


class TPUPlaceholders:
    """`Placeholders` on TorchTPU.

    Args:
        device: of the tensors.
        counters: count the compiles and runs.
    """

    def __init__(self, device: Device, counters: TPUCounters) -> None:
        self._device = device
        self._counters = counters
        # That of the trace that is being made.
        self._generator_of_trace: torch.Generator | None = None

    @contextmanager
    def recording(self) -> Iterator[None]:
        """See `Placeholders`."""
        _modes._push_eager_mode(_RECORD)
        thread = threading.current_thread()
        try:
            yield
        finally:
            # Each thread has modes of its own. Another one ends the step that a thread has left open when it ended.
            if threading.current_thread() is thread:
                _modes._pop_eager_mode()

    def stand_in(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `Placeholders`."""
        placeholder: torch.Tensor = _compiler.placeholder_like(tensor)
        return placeholder

    def _generator(self) -> torch.Generator:
        self._device.initialize()
        generator: torch.Generator = torch.tpu.default_generators[0]  # type: ignore[attr-defined]
        return generator

    def random_state(self) -> torch.Tensor:
        """See `Placeholders`."""
        state: torch.Tensor = _compiler.get_device_state_tensor(self._generator())
        return state

    def set_random_state(self, state: torch.Tensor) -> None:
        """See `Placeholders`."""
        _compiler.set_device_state_tensor(self._generator(), state)

    @contextmanager
    def tracing_random(self) -> Iterator[Callable[[], torch.Tensor]]:
        """See `Placeholders`."""
        with sharing_copies():
            stand_in = _compiler.make_export_mode_device_generator(self._generator())
        _compiler.set_export_mode_default_device_generator(stand_in)
        outer, self._generator_of_trace = self._generator_of_trace, stand_in
        try:
            yield lambda: _compiler.get_device_state_tensor(stand_in)
        finally:
            self._generator_of_trace = outer
            _compiler.clear_export_mode_default_device_generators()

    def stream_state(self) -> torch.Tensor:
        """The state of the stream that is drawn from now: in a trace, that of the trace."""
        state: torch.Tensor = _compiler.get_device_state_tensor(self._generator_of_trace or self._generator())
        return state

    def set_stream_state(self, state: torch.Tensor) -> None:
        """Has the stream that is drawn from now go on from a state: in a trace, one of the trace."""
        _compiler.set_device_state_tensor(self._generator_of_trace or self._generator(), state)

    def same_value(self, one: torch.Tensor, other: torch.Tensor) -> bool:
        """See `Placeholders`."""
        # A function mode of a trace would take them for tensors that the step uses.
        with torch._C.DisableTorchFunction():
            return one.data_ptr() == other.data_ptr()

    def text(self, results: Sequence[torch.Tensor], arguments: Sequence[torch.Tensor]) -> str:
        """See `Placeholders`; without the name of the module, which has a line of the caller's code in it."""
        with self.recording():
            text: str = _compiler.serialize_mlir_text(_compiler.build_mlir(list(results), list(arguments)))
        return text.partition("\n")[2]

    def compile(
        self, results: Sequence[torch.Tensor], arguments: Sequence[torch.Tensor], donated: Sequence[int], name: str
    ) -> Run:
        """See `Placeholders`."""
        began = time.perf_counter()
        with self.recording():
            compiled = _compiler.traverse_and_compile(
                result_tensors=list(results),
                argument_tensors=list(arguments),
                donated_inputs=list(donated),
                module_name=name,
            )
        self._counters.compiled(time.perf_counter() - began)
        return _Executable(_compiler.make_compiled_runner(compiled.executable), self._counters)


class _Executable:
    """A compiled program.

    Args:
        run: launches it.
        counters: count the runs.
    """

    def __init__(self, run: Run, counters: TPUCounters) -> None:
        self._run = run
        self._counters = counters
        self._has_run = False

    def __call__(self, values: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Launches it; returns the results.

        A launch that fails is reported when a result is read, by when the step counts as done. A program for which the
        device has not enough memory fails in its first launch, so that one is waited for. Its arguments are still there
        if it failed.
        """
        self._counters.executions += 1
        results: Sequence[torch.Tensor] = self._run(values)
        if not self._has_run:
            _sync.synchronize(list(results), wait=True)
            self._has_run = True
        return results
