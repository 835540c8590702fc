"""`CachedGraphs`: torch_xla's cache of compiled graphs. `TakenValues`: what executions under way have taken."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch_xla
from torch_xla.utils.buffer_donor_context import alias_with_buffer_donor_config

from xla_adapters.runtime.interface.executables import GraphInput

_C = torch_xla._XLAC
# One is executed, one is ready to follow it.
EXECUTIONS_KEPT = 2


class TakenValues:
    """What the last executions took the buffers of lives on until others have followed.

    Whoever lets go of such a value waits until the execution that took it is over (`CommonPjRtBuffer::ReleaseBuffer` in
    PJRT waits for the donation). Were it let go of at once, the host would prepare no step while the device executes
    one, and the device would stand still while the host does.

    Args:
        executions: how many.
    """

    def __init__(self, executions: int = EXECUTIONS_KEPT) -> None:
        self._taken: deque[list[torch.Tensor]] = deque(maxlen=executions)

    def add(self, values: list[torch.Tensor]) -> None:
        """The values that the latest execution has taken. Waits for the one of which others have followed."""
        self._taken.append(values)


class CachedGraphs:
    """Compiles pending graphs as they are, and runs them by their hash in torch_xla's cache of executables."""

    def __init__(self) -> None:
        self._taken = TakenValues()

    def inputs(self, outputs: Sequence[torch.Tensor]) -> list[GraphInput]:
        """See `Executables`."""
        numbers, values = _C._get_tensors_xla_device_data_node(list(outputs))
        return [
            GraphInput(handle=handle, number=number, value=value)
            for number, handle, value in zip(numbers, _C._get_tensors_handle(values), values, strict=True)
        ]

    def text(self, outputs: Sequence[torch.Tensor]) -> bytes:
        """See `Executables`."""
        return bytes(_C._get_xla_tensors_hlo_proto(list(outputs)))

    def name(self, outputs: Sequence[torch.Tensor], donated: Sequence[torch.Tensor]) -> bytes:
        """See `Executables`."""
        with _donating(donated, for_good=False):
            return bytes(_C._get_graph_hash(list(outputs)))

    def compile(self, outputs: Sequence[torch.Tensor], donated: Sequence[torch.Tensor]) -> bytes:
        """See `Executables`."""
        with _donating(donated, for_good=True):
            name = bytes(_C._get_graph_hash(list(outputs)))
            _C._xla_warm_up_cache(list(outputs), [])
        return name

    def run(
        self, name: bytes, inputs: Sequence[torch.Tensor], *, taken: Sequence[torch.Tensor] = ()
    ) -> list[torch.Tensor]:
        """See `Executables`, and `TakenValues` for `taken`, which holds device tensors (`LazyTensors.inner`)."""
        results = list(_C._run_cached_graph(name, list(inputs)))
        if taken:
            self._taken.add(list(taken))
        return results


@contextmanager
def _donating(tensors: Sequence[torch.Tensor], *, for_good: bool) -> Iterator[None]:
    """What is compiled inside may reuse the buffers of these tensors; the marks stay, unless it fails."""
    stay = False
    try:
        for tensor in tensors:
            _C._set_buffer_donation(tensor, True)
        with alias_with_buffer_donor_config(True):
            yield
        stay = for_good
    finally:
        if not stay:
            for tensor in tensors:
                _C._set_buffer_donation(tensor, False)
