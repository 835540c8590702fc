"""`KeptMemory`: has the process keep the memory that steps on CPU devices free."""

from __future__ import annotations

import logging

from xla_adapters.cpu.process.compiler_flags import divide_temporary_memory, leave_temporary_memory_whole
from xla_adapters.cpu.process.host_memory import LARGEST_PIECE, HostMemory
from xla_adapters.errors import ConfigError
from xla_adapters.runtime import Device

_log = logging.getLogger("xla_adapters")


class KeptMemory:
    """Combines the two settings that keep freed memory: glibc's (`HostMemory`), and XLA's size of allocations.

    Keeping it saves the kernel from mapping and clearing the pages in each step.
    """

    def __init__(self) -> None:
        self._host_memory = HostMemory.of_process()
        self._divides = False

    def divide(self, device: Device) -> None:
        """Sets the XLA flag for smaller allocations if the runtime has not started; logs it."""
        if not device.started() and device.hardware() == "CPU" and self._host_memory.keeps():
            self._divides = divide_temporary_memory(LARGEST_PIECE) or self._divides
        if self._divides:
            # Logged again on later calls: logging is usually not configured yet as a Trainer is imported.
            _log.info(
                "XLA_FLAGS has --xla_multiheap_size_constraint_per_heap=%d: what a step needs for its temporary values "
                "is taken in pieces that stay with the process. Put a flag of that name there yourself (-1 for one "
                "piece) to have it otherwise",
                LARGEST_PIECE,
            )

    def could_have_huge_pages(self) -> bool:
        """See `HostMemory.could_have_huge_pages`."""
        return self._host_memory.could_have_huge_pages()

    def keep(self, device: Device, keep: bool | None) -> None:
        """See `HostMemory.keep_freed`.

        Raises:
            ConfigError: `keep` is True, and the device is not a CPU, or the process does not use glibc.
        """
        if device.hardware() == "CPU":
            self._host_memory.keep_freed(keep)
            if self._host_memory.keeps():
                self.divide(device)
            elif self._divides and not device.started():
                leave_temporary_memory_whole(LARGEST_PIECE)
                self._divides = False
        elif keep:
            raise ConfigError(
                f"initialize(keep_memory=True) is for CPU devices, and this one is {device.hardware()}, which has a "
                "memory of its own; leave it out here"
            )
