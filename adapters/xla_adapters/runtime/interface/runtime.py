"""`Runtime`: a device runtime as the package uses it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cached_property
from typing import Any, TypeVar

from xla_adapters.errors import UnsupportedOptionError
from xla_adapters.runtime.interface.device import Counters, Device, Random
from xla_adapters.runtime.interface.executables import Executables
from xla_adapters.runtime.interface.lazy_tensors import LazyTensors
from xla_adapters.runtime.interface.placeholders import Placeholders
from xla_adapters.runtime.interface.shared_buffers import SharedBuffers
from xla_adapters.runtime.interface.tensors import AbstractTensors, CustomKernels, Spmd, Transfers, Values
from xla_adapters.runtime.interface.tracing import Tracing

_Part = TypeVar("_Part")


class Runtime:
    """A device runtime: the objects that implement each protocol of the runtime interface.

    An optional part that a runtime lacks raises `UnsupportedOptionError` when it is used. Code that can do without one
    asks `has_lazy_tensors`, `has_placeholders`, `has_shared_buffers` or `has_custom_kernels` first.

    Args:
        name: of the library, for messages.
        dynamo_backend: what `torch.compile(backend=...)` is given to compile for these devices.
        device: see `Device`; the other required parts accordingly.
        why_no_replay: tries out on small graphs whether executables can be run again without tracing. Returns why not,
            as a clause for messages; None if it works. Called at most once.
        executables: see `Executables`; None if steps are traced with `placeholders`.
        placeholders: see `Placeholders`; None if steps are traced with lazy tensors, or not at all.
        spmd: see `Spmd`; None if each process drives one device.
        lazy: see `LazyTensors`; None if tensors always have a value outside of a trace.
        shared_buffers: see `SharedBuffers`; None if a copied tensor has a buffer of its own at once.
        custom_kernels: see `CustomKernels`; None if user code cannot add computations to a graph.
        abstract: see `AbstractTensors`; None if every tensor has memory.
        is_abstract: whether no tensor has: what is copied to the device is a shape there, and its values do not matter.
    """

    def __init__(
        self,
        *,
        name: str,
        dynamo_backend: str,
        device: Device,
        transfers: Transfers,
        tracing: Tracing,
        values: Values,
        random: Random,
        counters: Counters,
        why_no_replay: Callable[[Runtime], str | None],
        executables: Executables | None = None,
        placeholders: Placeholders | None = None,
        spmd: Spmd | None = None,
        lazy: LazyTensors | None = None,
        shared_buffers: SharedBuffers | None = None,
        custom_kernels: CustomKernels | None = None,
        abstract: AbstractTensors | None = None,
        is_abstract: bool = False,
    ) -> None:
        self.name = name
        self.dynamo_backend = dynamo_backend
        self.device = device
        self.transfers = transfers
        self.tracing = tracing
        self.values = values
        self.random = random
        self.counters = counters
        self._why_no_replay = why_no_replay
        self._executables = executables
        self._placeholders = placeholders
        self._spmd = spmd
        self._lazy = lazy
        self._shared_buffers = shared_buffers
        self._custom_kernels = custom_kernels
        self._abstract = abstract
        self.is_abstract = is_abstract

    def with_parts(self, **parts: Any) -> Runtime:
        """A copy that has other parts.

        Args:
            **parts: by the names of the arguments.
        """
        changed = object.__new__(Runtime)
        own = {name: value for name, value in vars(self).items() if name != "replay_works"}
        given = {name if name in own else f"_{name}": part for name, part in parts.items()}
        changed.__dict__.update(own, **given)
        return changed

    @property
    def has_lazy_tensors(self) -> bool:
        """Whether `lazy` is there."""
        return self._lazy is not None

    @property
    def has_executables(self) -> bool:
        """Whether `executables` is there."""
        return self._executables is not None

    @property
    def splits_steps(self) -> bool:
        """Whether a step can be executed in several parts, with values between them."""
        return not (self.has_placeholders or self.is_abstract)

    @property
    def has_placeholders(self) -> bool:
        """Whether `placeholders` is there."""
        return self._placeholders is not None

    @property
    def has_spmd(self) -> bool:
        """Whether `spmd` is there."""
        return self._spmd is not None

    @property
    def has_shared_buffers(self) -> bool:
        """Whether `shared_buffers` is there."""
        return self._shared_buffers is not None

    @property
    def has_custom_kernels(self) -> bool:
        """Whether `custom_kernels` is there."""
        return self._custom_kernels is not None

    @property
    def spmd(self) -> Spmd:
        """Tensors cut over several devices.

        Raises:
            UnsupportedOptionError: the runtime lacks it.
        """
        return self._part(
            self._spmd,
            "SPMD (one process that drives several devices), which sharding needs: start a process for each device "
            "with `xla-adapters launch script.py`, and use sharding='dp'",
        )

    @property
    def executables(self) -> Executables:
        """Compiles and runs what is pending.

        Raises:
            UnsupportedOptionError: the runtime lacks it.
        """
        return self._part(self._executables, "executables of lazy tensors")

    @property
    def placeholders(self) -> Placeholders:
        """Traces of code that runs with placeholders in place of its tensors.

        Raises:
            UnsupportedOptionError: the runtime lacks it.
        """
        return self._part(self._placeholders, "placeholders, with which steps are traced")

    @property
    def lazy(self) -> LazyTensors:
        """What step replay must know of lazy tensors.

        Raises:
            UnsupportedOptionError: the runtime lacks it.
        """
        return self._part(self._lazy, "lazy tensors, which step replay needs: use step_replay=False")

    @property
    def shared_buffers(self) -> SharedBuffers:
        """Which tensors share a buffer.

        Raises:
            UnsupportedOptionError: the runtime lacks it.
        """
        return self._part(self._shared_buffers, "tensors that share buffers, which step replay asks for")

    @property
    def custom_kernels(self) -> CustomKernels:
        """Computations that extensions add to graphs.

        Raises:
            UnsupportedOptionError: the runtime lacks it.
        """
        return self._part(self._custom_kernels, "computations of one's own in graphs, which an extension asks for")

    @property
    def abstract(self) -> AbstractTensors:
        """Tensors without memory.

        Raises:
            UnsupportedOptionError: the runtime lacks it.
        """
        return self._part(self._abstract, "tensors without memory, with which steps are traced for devices elsewhere")

    def _part(self, part: _Part | None, what: str) -> _Part:
        if part is None:
            raise UnsupportedOptionError(f"the runtime {self.name} does not have {what}")
        return part

    @cached_property
    def replay_works(self) -> bool:
        """Whether steps can be replayed: executables run again without tracing. Says why not in a warning, once.

        The first read starts the runtime, and compiles and runs small graphs to find out.
        """
        lacks = "has no lazy tensors, which step replay needs" if self.has_executables else "cannot trace steps"
        why: str | None = f"the runtime {self.name} {lacks}"
        if self.has_lazy_tensors or self.has_placeholders:
            why = self._why_no_replay(self)
        if why is not None:
            again = "traced again at each call" if self.has_executables else "executed operation by operation"
            warnings.warn(f"{why}: steps are {again} instead of being replayed", UserWarning, stacklevel=2)
        return why is None
