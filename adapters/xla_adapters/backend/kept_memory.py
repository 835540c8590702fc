"""The part of the seam that has a process keep the memory its steps free, on devices that compute in the host's."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch_xla.runtime as xr

from xla_adapters.backend.compiler_flags import divide_temporary_memory, leave_temporary_memory_whole
from xla_adapters.backend.host_memory import LARGEST_PIECE, HostMemory
from xla_adapters.errors import ConfigError

if TYPE_CHECKING:
    from xla_adapters.backend.interface import Backend as _Rest
else:
    _Rest = object

_log = logging.getLogger("xla_adapters")


class KeptMemory(_Rest):
    """Memory that is freed and kept; a part of `PJRTBackend`."""

    def __init__(self) -> None:
        super().__init__()
        self._host_memory = HostMemory.of_process()
        self._divides = False

    def _divide_memory(self) -> None:
        """Has the runtime, if it has not started, take memory in pieces that can be kept; says so."""
        if not self.runtime_started() and xr.device_type() == "CPU" and self._host_memory.keeps():
            self._divides = divide_temporary_memory(LARGEST_PIECE) or self._divides
        if self._divides:
            # Again as the runtime is used: who imports a Trainer has no log yet.
            _log.info(
                "XLA_FLAGS has --xla_multiheap_size_constraint_per_heap=%d: what a step needs for its temporary values "
                "is taken in pieces that stay with the process. Put a flag of that name there yourself (-1 for one "
                "piece) to have it otherwise",
                LARGEST_PIECE,
            )

    def could_have_huge_pages(self) -> bool:
        """Whether the device's memory is the host's, and has pages of the usual size only for want of asking."""
        return self._host_memory.could_have_huge_pages()

    def _keep_memory(self, keep: bool | None) -> None:
        if xr.device_type() == "CPU":
            self._host_memory.keep_freed(keep)
            if self._host_memory.keeps():
                self._divide_memory()
            elif self._divides and not self.runtime_started():
                leave_temporary_memory_whole(LARGEST_PIECE)
                self._divides = False
        elif keep:
            raise ConfigError(
                f"initialize(keep_memory=True) is for CPU devices, and this one is {xr.device_type()}, which has a "
                "memory of its own; leave it out here"
            )
