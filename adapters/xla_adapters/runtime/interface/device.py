"""`Device`: starting the runtime, and what is known of the devices and processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from xla_adapters.runtime.tuning import DEFAULT_TUNING, Tuning


class Device(Protocol):
    """The device that this process computes on: starts the runtime, and answers questions about devices and processes.

    Methods start the runtime if they need it; `prepare`, `started`, `hardware` and `owns` never do.
    """

    def prepare(self) -> None:
        """Sets what the runtime reads as it starts (`XLA_FLAGS`). `initialize` calls it."""

    def initialize(self, *, spmd: bool = False, tuning: Tuning = DEFAULT_TUNING) -> None:
        """Starts the runtime. A further call changes nothing but what `tuning` asks for.

        From then on `module.to(device)` keeps `Parameter` objects and tied weights.

        Args:
            spmd: drive all devices of the process as one.
            tuning: options for extensions (`runtime/extensions.py`), passed on to their `initialize` before the
                runtime starts. The runtime itself does not read it.

        Raises:
            RuntimeOrderError: SPMD or an option of `tuning` is asked for after the runtime has started without it.
            ConfigError: the environment or the device does not allow what is asked for.
            UnsupportedOptionError: the runtime has no SPMD, or its own automatic sharding was switched on.
        """

    def use_compile_cache(self, folder: str) -> None:
        """Keeps executables in a folder, for later processes. Where the device cannot load them, only warns, once.

        Raises:
            RuntimeOrderError: the runtime has started without it.
        """

    def started(self) -> bool:
        """Whether the runtime runs. From then on SPMD cannot be switched on, and `XLA_FLAGS` has no effect."""

    def torch_device(self) -> torch.device:
        """The device as torch names it, for `tensor.to`; under SPMD the virtual device that stands for all."""

    def hardware(self) -> str:
        """The kind of device in capitals, as PJRT names it: `CPU`, `TPU`, `CUDA`, ..."""

    def kind(self) -> str:
        """The model of the device as PJRT names it (`"TPU v5 lite"`, `"cpu"`); empty if the runtime does not tell."""

    def count(self) -> int:
        """How many devices all processes have together."""

    def count_here(self) -> int:
        """How many devices this process drives."""

    def is_spmd(self) -> bool:
        """Whether all devices of the process are driven as one. False if the runtime has no SPMD."""

    def memory_info(self) -> dict[str, float]:
        """Bytes of the device's memory by name (`bytes_used`, ...); empty if the device does not tell."""

    def world_size(self) -> int:
        """How many replicas train, each in a process of its own; 1 under SPMD."""

    def process_index(self) -> int:
        """Which replica this process is, from 0."""

    def preemption_sync_point(self) -> Callable[[int], bool] | None:
        """A function that says of a step whether all processes must save after it, because one will be ended.

        Returns:
            The function, to be called with the step's number by every process; None if there is one process only, or
            the platform announces nothing. Its first call may install a handler of SIGTERM.
        """

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor lives on a device of this runtime, with or without a value."""

    def wait(self) -> None:
        """Blocks until all executions and transfers that were begun have ended."""

    def start_profile(self, folder: str) -> bool:
        """Starts to record what host and device do; returns whether it did: a process records one profile at a time.

        Args:
            folder: where `stop_profile` will write, in the form that TensorBoard and xprof read.
        """

    def mark_profile(self, name: str) -> Callable[[], None]:
        """Begins a span of the profile that is being recorded, on this thread.

        Args:
            name: as the profile shows it.

        Returns:
            What ends the span.
        """

    def stop_profile(self) -> None:
        """Ends the recording that `start_profile` started, and writes it."""

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Whether an error of the runtime says that the device has too little memory to compile or execute."""
