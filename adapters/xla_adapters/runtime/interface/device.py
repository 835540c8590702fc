"""`Device`, `Counters` and `Random`: the devices and processes, what they did, and their random stream."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from xla_adapters.config import CacheDir
from xla_adapters.runtime.compile_cache import CacheCounts
from xla_adapters.runtime.ranks import Ranks


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """Options for extensions; see `xla_adapters.initialize`, which explains them.

    Attributes:
        fast_compile: whether XLA leaves out its slowest pass.
        keep_memory: whether the process keeps memory that a step frees; None leaves it to the extension.
    """

    fast_compile: bool = False
    keep_memory: bool | None = None

    @property
    def asks_for_something(self) -> bool:
        """Whether an option differs from its default."""
        return self != DEFAULT_TUNING


DEFAULT_TUNING = Tuning()


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

    def use_compile_cache(self, cache_dir: CacheDir) -> None:
        """Keeps compiled programs in a folder, for later processes (`runtime/compile_cache`).

        Raises:
            RuntimeOrderError: a folder is asked for after the runtime has started without a cache.
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

    def launched(self) -> int:
        """How many processes a launcher (torchrun) has started, as far as this runtime has a device for each; or 1."""

    def prepare_launch(self, processes: int | None) -> int:
        """Sets the environment variables that processes need which a launcher is about to start, one for each device.

        Args:
            processes: how many; None is one for each device of this machine.

        Returns:
            How many.

        Raises:
            ConfigError: there are no devices for them, or they need no launcher.
        """

    def world_size(self) -> int:
        """How many replicas train, each in a process of its own; 1 under SPMD."""

    def process_index(self) -> int:
        """Which replica this process is, from 0."""

    @property
    def ranks(self) -> Ranks | None:
        """The processes that train together, one device each; None if there is one, or under SPMD."""

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


# ---- counters -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """Running totals since the process started. Times are in seconds."""

    compiles: int
    compile_seconds: float
    executions: int
    transfers_to_host: int
    transfers_to_device: int
    eager_compiles: int
    eager_ops: int
    # Programs of both kinds that were loaded from the compile cache; they are no compiles.
    loads: int = 0

    def since(self, before: Metrics) -> dict[str, Any]:
        """What was added after `before`, by name."""
        return {name: total - getattr(before, name) for name, total in vars(self).items()}


class CompiledMemory(NamedTuple):
    """The memory that an executable needs on a device, by kind, in bytes; from the compiler's own analysis.

    Attributes:
        inputs, outputs: what it reads and returns.
        aliased: the part of the outputs that lies where inputs were.
        temporaries: values between its operations.
        code: the executable itself; 0 on CPU devices.
    """

    inputs: int
    outputs: int
    aliased: int
    temporaries: int
    code: int

    @property
    def total(self) -> int:
        """All of it at once."""
        return self.inputs + self.outputs - self.aliased + self.temporaries + self.code


class Counters(Protocol):
    """Counts what the runtime did since the process started."""

    def metrics(self) -> Metrics:
        """All totals. Waits for the device, since an execution is counted when it ends."""

    def compile_totals(self) -> tuple[int, float]:
        """Graphs compiled or loaded, and the seconds that took. Does not wait, and leaves out eager operations."""

    def executables_compiled(self) -> int:
        """Executables compiled, those of single eager operations too. Cheap: asked at each replayed call."""

    def compile_cache(self) -> CacheCounts:
        """What the compile cache of this process did, for programs of all kinds."""

    def compiled_memory(self) -> list[CompiledMemory]:
        """What each executable needs that was compiled since the last call; empty where the runtime does not tell."""

    def host_operators(self) -> dict[str, int]:
        """How often each operator was computed on the host, for which the runtime has no kernel on the device."""

    def executables_kept(self) -> int:
        """How many executables the runtime keeps; with one more it forgets the one that was not used for longest."""


# ---- random numbers -------------------------------------------------------------------------------


class Random(Protocol):
    """The stream that random operations on the device draw from, and the algorithm they draw with.

    The state of the stream is one integer, an input of every graph that draws: another state is never another graph.

    Attributes:
        algorithm_variable: the environment variable that chooses the algorithm.
    """

    algorithm_variable: str

    def seed(self) -> int:
        """The state of the stream, of 64 bits."""

    def set_seed(self, seed: int) -> None:
        """Sets the state of the stream."""

    def position(self) -> Any:
        """Where the stream is, in a trace, too: for `is_at` and `go_to`. Reads nothing from the device."""

    def is_at(self, position: Any) -> bool:
        """Whether nothing was drawn since `position` was taken, in the same trace."""

    def go_to(self, position: Any) -> None:
        """Has the stream go on from where `position` was taken, in the same trace."""

    def seed_input(self) -> torch.Tensor:
        """The present state as an input of an executable."""

    def seed_number(self) -> int:
        """The `GraphInput.number` of the input that is the state of the stream."""

    def algorithm(self) -> str:
        """What random numbers are drawn with: `default`, `philox` or `three_fry`. This call fixes it."""

    def ask_for_algorithm(self, name: str) -> str | None:
        """Asks for an algorithm, unless the environment does. Has no effect once numbers were drawn.

        Args:
            name: as `algorithm` returns it.

        Returns:
            What the environment asks for; None if it leaves the choice.

        Raises:
            ConfigError: the environment asks for an algorithm that the runtime does not know.
        """
