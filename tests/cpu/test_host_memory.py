"""Memory that a step frees stays with the process, on devices that compute in the host's memory."""

from __future__ import annotations

import ctypes
import logging
import resource
import statistics
import threading

import pytest
import torch

import xla_adapters
from tests.cpu.glibc import NEEDS_GLIBC
from tests.isolation import isolated
from xla_adapters import ConfigError
from xla_adapters.cpu.process.host_memory import HostMemory

# ---- what the allocator is told ------------------------------------------------------------------------


class _Allocator:
    def __init__(self) -> None:
        self.told: list[tuple[int, int]] = []

    def mallopt(self, parameter: int, value: int) -> int:
        self.told.append((parameter, value))
        return 1


def test_it_is_told_once_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    allocator = _Allocator()
    memory = HostMemory(allocator.mallopt, {})
    with caplog.at_level(logging.INFO, "xla_adapters"):
        memory.keep_freed(None)
        memory.keep_freed(None)
        memory.keep_freed(True)
    assert allocator.told == [(-1, -1), (-2, 192 << 20), (-4, 0)]
    (record,) = caplog.records
    assert "initialize(keep_memory=False)" in record.getMessage()
    memory.keep_freed(False)
    memory.keep_freed(None)
    assert allocator.told[3:] == [(-1, 64 << 20), (-2, 128 << 10), (-3, 32 << 20), (-4, 65536)]


def test_what_it_does_by_itself_is_left_to_it() -> None:
    allocator = _Allocator()
    memory = HostMemory(allocator.mallopt, {})
    memory.keep_freed(False)
    memory.keep_freed(None)
    assert allocator.told == []


@pytest.mark.parametrize(
    "environment",
    [{"MALLOC_TRIM_THRESHOLD_": "131072"}, {"GLIBC_TUNABLES": "glibc.malloc.check=1:glibc.malloc.mmap_max=9"}],
)
def test_what_the_user_told_it_stands(environment: dict[str, str]) -> None:
    allocator = _Allocator()
    memory = HostMemory(allocator.mallopt, environment)
    memory.keep_freed(None)
    assert allocator.told == []
    memory.keep_freed(True)
    assert allocator.told


def test_another_allocator() -> None:
    memory = HostMemory(None, {})
    memory.keep_freed(None)
    memory.keep_freed(False)
    with pytest.raises(ConfigError, match="glibc"):
        memory.keep_freed(True)


@isolated(env={"PJRT_DEVICE": "TPU"})
def test_devices_with_a_memory_of_their_own() -> None:
    with pytest.raises(ConfigError, match="this one is TPU"):
        xla_adapters.initialize(keep_memory=True)


# ---- what comes of it ----------------------------------------------------------------------------------


def _pages_mapped(rows: int) -> float:
    """In a step whose temporary values take 8 bytes * `rows` * `rows`; the median of twenty steps.

    Each thread of the runtime that executes one keeps memory of its own.
    """

    @xla_adapters.CompiledStep
    def step(narrow: torch.Tensor) -> torch.Tensor:
        return (narrow @ narrow.T).sin().sum()

    narrow, runtime = torch.ones(rows, 16).to("xla"), xla_adapters.get_runtime()
    mapped = []
    for _ in range(23):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        step(narrow)
        runtime.device.wait()
        mapped.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    return statistics.median(mapped[3:])


@NEEDS_GLIBC
@isolated
def test_no_step_has_its_memory_mapped_anew() -> None:
    assert _pages_mapped(2200) < 200


@pytest.mark.slow
@NEEDS_GLIBC
@isolated
def test_as_the_allocator_does_it() -> None:
    xla_adapters.initialize(keep_memory=False)
    # 141 MB: more than glibc would have free in any heap.
    assert _pages_mapped(4200) > 30_000


def _pages_of_a_thread() -> list[int]:
    """Mapped when it takes 57 MB, writes there and frees them, three times, beside 20 MB that it has in its heap."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = (
        ctypes.c_void_p,
        [ctypes.c_size_t],
        [ctypes.c_void_p],
    )
    mapped = []

    def work() -> None:
        other = libc.malloc(20 << 20)
        for _ in range(3):
            before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
            piece = libc.malloc(57 << 20)
            ctypes.memset(piece, 1, 57 << 20)
            libc.free(piece)
            mapped.append(resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before)
        libc.free(other)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return mapped


@NEEDS_GLIBC
@isolated
def test_a_heap_of_a_thread_that_is_empty_stays() -> None:
    _, *others = _pages_of_a_thread()
    assert min(others) > 14_000
    xla_adapters.initialize()
    _, *others = _pages_of_a_thread()
    assert max(others) < 200
    # What is free in a heap that something else holds may stay; an empty one goes.
    xla_adapters.initialize(keep_memory=False)
    _, *others = _pages_of_a_thread()
    assert min(others) > 14_000
    xla_adapters.initialize(keep_memory=True)
    _, *others = _pages_of_a_thread()
    assert max(others) < 200
