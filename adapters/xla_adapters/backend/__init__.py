"""The seam between this package and the device runtime."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from xla_adapters.backend.interface import Backend, FastCompile, Metrics, SeamEvent
from xla_adapters.backend.parts import Part
from xla_adapters.backend.tiles import Tiles

__all__ = ["Backend", "Metrics", "Part", "SeamEvent", "Tiles", "get_backend", "initialize", "using_backend"]

_backend: Backend | None = None


def get_backend() -> Backend:
    """The backend in use: torch_xla, imported at the first call."""
    global _backend
    if _backend is None:
        from xla_adapters.backend.pjrt import PJRTBackend

        _backend = PJRTBackend()
    return _backend


def initialize(*, spmd: bool = False, fast_compile: FastCompile = False, keep_memory: bool | None = None) -> None:
    """Starts the device runtime now. Trainers and steps do it themselves.

    Args:
        spmd: drive all devices of the process as one (needed for sharding).
        fast_compile: on CPU devices, `"blocks"` makes what a step repeats (layers, updates of alike parameters; not
            where layers convolve) computations that are called, whose kernels XLA shares, and layers that follow each
            other turns of a loop: 48 layers of a GPT-2 took half of the CPU time; steps took up to 1.3 times as long,
            and up to 1.3 times the memory. It
            is for steps on one device that are replayed or to be. True leaves out the pass of XLA's compiler that slows
            the others down most, too, which brings little since there are loops. Sums are added up one by one then, not
            as a tree, which rounds more, and wide models may take longer in each step (docs/performance.md); it is
            asked for through `XLA_FLAGS`.
        keep_memory: on CPU devices, whether the process keeps the memory that a step frees (glibc's `mallopt`), rather
            than have the system map it anew in each: 24 layers of a GPT-2 took 0.65 of the CPU time. None keeps it,
            unless the environment tells the allocator otherwise (`MALLOC_TRIM_THRESHOLD_` and the like,
            `GLIBC_TUNABLES`); if the runtime has not started yet, XLA is asked to take it in pieces that can be kept
            (through `XLA_FLAGS`; `import hf_trainer` asks, too). Can be changed at any time, though what was kept may
            stay; what Trainers and steps start keeps it too.

    Raises:
        RuntimeOrderError: a device was already used without what is asked for.
        ConfigError: `fast_compile` or `keep_memory` on a device that is no CPU, another `fast_compile`, or
            `keep_memory` without glibc.
    """
    get_backend().initialize(spmd=spmd, fast_compile=fast_compile, keep_memory=keep_memory)


@contextmanager
def using_backend(backend: Backend) -> Iterator[Backend]:
    """Puts another backend in place for the duration of the context (tests, successors)."""
    global _backend
    previous, _backend = _backend, backend
    try:
        yield backend
    finally:
        _backend = previous
