"""The seam between this package and the device runtime."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from xla_adapters.backend.interface import Backend, Metrics, SeamEvent
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


def initialize(*, spmd: bool = False, fast_compile: bool = False) -> None:
    """Starts the device runtime now. Trainers and steps do it themselves.

    Args:
        spmd: drive all devices of the process as one (needed for sharding).
        fast_compile: on CPU devices, leave out the pass of XLA's compiler that slows the others down most: 48 layers
            of a GPT-2 took 0.56 of the CPU time. Sums are added up one by one instead of as a tree, which rounds more.
            It is asked for through `XLA_FLAGS`.

    Raises:
        RuntimeOrderError: a device was already used without what is asked for.
        ConfigError: `fast_compile` on a device that is no CPU.
    """
    get_backend().initialize(spmd=spmd, fast_compile=fast_compile)


@contextmanager
def using_backend(backend: Backend) -> Iterator[Backend]:
    """Puts another backend in place for the duration of the context (tests, successors)."""
    global _backend
    previous, _backend = _backend, backend
    try:
        yield backend
    finally:
        _backend = previous
