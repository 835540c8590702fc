"""Extensions: optimizations for one kind of device. All are optional."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from xla_adapters.errors import ConfigError
from xla_adapters.runtime.interface import Device, Runtime
from xla_adapters.runtime.interface.device import Tuning

Lowerings = Mapping[Callable[..., Any], Callable[..., torch.Tensor]]


class Extension:
    """Optimizations for one kind of device; each method adds nothing unless it is overridden.

    Methods are called on every device, and look at `Device.hardware()` first.
    """

    def prepare(self, device: Device) -> None:
        """Called before the runtime starts, which another library may do; sets options that it reads as it starts."""

    def initialize(self, device: Device, *, spmd: bool, tuning: Tuning) -> None:
        """Called before the runtime starts, and again by `xla_adapters.initialize` with other options.

        Raises:
            ConfigError: an option is not supported on this device.
            RuntimeOrderError: an option comes too late.
        """

    def random_algorithm(self, device: Device) -> str | None:
        """The fastest algorithm to draw random numbers with on this device, if that is known."""
        return None

    def lowerings(self, runtime: Runtime) -> Lowerings:
        """Replacements for functions of torch while a step is traced."""
        return {}

    def around_step(self, runtime: Runtime) -> AbstractContextManager[None]:
        """A context that is active while a step is traced."""
        return nullcontext()

    def step_observer(self, device: Device) -> Callable[[str], None] | None:
        """Called once by each `StepProgram`, after its first step; what it returns is called after each step.

        What it returns takes the program's name.
        """
        return None


# Packages that register extensions when they are imported: named here, since they stand above and can be left out.
_PACKAGES = ("xla_adapters.cpu",)
_registered: list[Extension] = []


def register(extension: Extension) -> None:
    """Adds an extension, for the rest of the process."""
    _registered.append(extension)


def extensions() -> tuple[Extension, ...]:
    """The registered extensions, in the order of registration. The first call imports the packages that have some."""
    for package in _PACKAGES:
        if package not in sys.modules and find_spec(package) is not None:
            import_module(package)
    return tuple(_registered)


def initialize_extensions(device: Device, *, spmd: bool, tuning: Tuning) -> None:
    """Calls `Extension.initialize` of each extension.

    A runtime does so before it starts, and again if `tuning` asks for something.

    Raises:
        ConfigError: an option is asked for that no extension is there to read, or as `Extension.initialize`.
        RuntimeOrderError: as `Extension.initialize`.
    """
    for extension in extensions():
        extension.initialize(device, spmd=spmd, tuning=tuning)
    # Without extensions nothing is kept.
    if not extensions() and (tuning.fast_compile is not False or tuning.keep_memory):
        raise ConfigError(
            f"initialize(fast_compile={tuning.fast_compile!r}, keep_memory={tuning.keep_memory!r}): both are a part of "
            "the tuning for CPU devices, which XLA_ADAPTERS_CPU_TUNING=0 switches off; leave these options out, or the "
            "variable"
        )
