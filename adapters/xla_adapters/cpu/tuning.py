"""`CPUTuning`: the extension for XLA:CPU."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from xla_adapters.cpu.dropout import Dropout
from xla_adapters.cpu.lowerings import CONVOLUTIONS, layer_norms, sums_as_products
from xla_adapters.cpu.process_options import (
    KeptMemory,
    MappedMemory,
    keep_barriers,
    keeps_barriers,
    leave_out_slow_passes,
    leaves_out_slow_passes,
)
from xla_adapters.errors import ConfigError, RuntimeOrderError
from xla_adapters.runtime import Device, Runtime
from xla_adapters.runtime.extensions import Extension, Lowerings
from xla_adapters.runtime.interface.device import Tuning

_log = logging.getLogger("xla_adapters")


class CPUTuning(Extension):
    """Lowerings and options of the process that make steps on XLA:CPU faster, or faster to compile."""

    def __init__(self) -> None:
        self._asked_for_barriers = False
        self._memory = KeptMemory()

    # ---- options of the process ------------------------------------------------------------------

    def prepare(self, device: Device) -> None:
        """As in `Extension`; may set `XLA_FLAGS`, which is logged."""
        self._memory.divide(device)
        self._keep_barriers(device)

    def initialize(self, device: Device, *, spmd: bool, tuning: Tuning) -> None:
        """As in `Extension`; may set `XLA_FLAGS` and options of glibc's allocator, which is logged."""
        # Sharded graphs have no use for barriers.
        if not spmd:
            self._keep_barriers(device)
        if tuning.fast_compile is not False:
            self._compile_fast(device, tuning.fast_compile)
        self._memory.keep(device, tuning.keep_memory)

    def _compile_fast(self, device: Device, asked: object) -> None:
        if asked is not True:
            raise ConfigError(
                f"initialize(fast_compile={asked!r}) is not a valid value; valid values: False, True. ('blocks', which "
                "compiled once what a step repeats, is no longer there: use True, which leaves out XLA's slowest pass)"
            )
        if device.hardware() != "CPU":
            raise ConfigError(
                f"initialize(fast_compile=True) is for CPU devices, and this one is {device.hardware()}: it is known "
                "to shorten the work of XLA's compiler for the CPU alone; leave it out here"
            )
        if device.started() and not leaves_out_slow_passes():
            raise RuntimeOrderError(
                "fast compiles were asked for after the XLA runtime had started, which reads its flags once. Call "
                "xla_adapters.initialize(fast_compile=True) at the start of the program, before a tensor or model is "
                "moved to the XLA device and before transformers.TrainingArguments are created, which start the "
                "runtime."
            )
        leave_out_slow_passes()

    def _keep_barriers(self, device: Device) -> None:
        """Stops XLA from fusing across optimization barriers if the runtime has not started; logged."""
        if not device.started() and device.hardware() == "CPU":
            self._asked_for_barriers = keep_barriers() or self._asked_for_barriers
        if self._asked_for_barriers:
            # Logged again here: logging is usually not configured yet as a Trainer is imported.
            _log.info(
                "XLA_FLAGS has --xla_disable_hlo_passes=cse_barrier_expander: in steps on one device what layer norms "
                "read is computed once, not again in each operation that reads it. Put a flag of that name there "
                "yourself, with other passes or none, to have it otherwise"
            )

    def fuses_up_to_barriers(self, device: Device) -> bool:
        """Whether barriers limit fusion: on one CPU device, with the flag set."""
        return self._is_one_cpu(device) and keeps_barriers()

    def could_have_huge_pages(self) -> bool:
        """Whether glibc could use huge pages and was not told to."""
        return self._memory.could_have_huge_pages()

    # ---- steps -----------------------------------------------------------------------------------

    def random_algorithm(self, device: Device) -> str | None:
        """As in `Extension`."""
        return "three_fry" if device.hardware() == "CPU" else None

    def lowerings(self, runtime: Runtime) -> Lowerings:
        """As in `Extension`."""
        if not (runtime.has_custom_kernels and self._is_one_cpu(runtime.device)):
            return {}
        found = {**CONVOLUTIONS, **(layer_norms(runtime) if self.fuses_up_to_barriers(runtime.device) else {})}
        if runtime.random.algorithm() == "three_fry":
            found |= Dropout(runtime).lowerings()
        return found

    def around_step(self, runtime: Runtime) -> AbstractContextManager[None]:
        """As in `Extension`."""
        if not (runtime.has_custom_kernels and self._is_one_cpu(runtime.device)):
            return nullcontext()
        return sums_as_products(runtime, cut_by_compiler=not leaves_out_slow_passes())

    def step_observer(self, device: Device) -> Callable[[str], None] | None:
        """As in `Extension`."""
        if device.hardware() != "CPU":
            return None
        return MappedMemory(could_have_huge_pages=self.could_have_huge_pages).step_ended

    @staticmethod
    def _is_one_cpu(device: Device) -> bool:
        return device.hardware() == "CPU" and not device.is_spmd()
