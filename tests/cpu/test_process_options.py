"""Memory that a step frees stays with the process on CPU devices; where it is mapped anew, a warning says so."""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import resource
import statistics
import subprocess
import sys
import threading
from collections.abc import Iterable
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel

import xla_adapters
from benchmarks import runs, timed_loops, timed_trainers
from benchmarks.harness import Plan
from benchmarks.sizes import sizes
from lightning_strategy import XLAEagerStrategy
from tests.isolation import isolated, run_in_child
from xla_adapters import ConfigError
from xla_adapters.cpu import TUNING, CPUTuning
from xla_adapters.cpu.process_options import (
    HostMemory,
    MappedMemory,
    divide_temporary_memory,
    leave_temporary_memory_whole,
)
from xla_adapters.runtime.interface.device import Tuning

GLIBC = "CS_GNU_LIBC_VERSION" in getattr(os, "confstr_names", {})
_TOLD = ("GLIBC_TUNABLES", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_TOP_PAD_")
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
# Where the kernel maps 2 MB at once by itself, pages tell nothing.
_COUNTS = not HUGE_PAGES.exists() or "[always]" not in HUGE_PAGES.read_text()
NEEDS_GLIBC = pytest.mark.skipif(
    not GLIBC or not _COUNTS or any(name in os.environ for name in _TOLD),
    reason="for glibc's allocator as it comes, and pages of the usual size",
)


# ---- glibc ----------------------------------------------------------------------------------------


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


# ---- temporary values in pieces -------------------------------------------------------------------


_FLAG = "--xla_multiheap_size_constraint_per_heap="
_OURS = f"{_FLAG}{32 << 20}"
_OF_OTHERS = ("--xla_disable_hlo_passes", "--xla_cpu_enable_fast_min_max")


def _flags() -> list[str]:
    """Without what is said of barriers and of NaN."""
    return [flag for flag in os.environ.get("XLA_FLAGS", "").split() if not flag.startswith(_OF_OTHERS)]


# ---- what the runtime is told ----------------------------------------------------------------------------


@pytest.mark.parametrize("set_before", ["", "--xla_backend_optimization_level=0"])
def test_it_is_said_once_and_can_be_taken_back(set_before: str) -> None:
    environment = {"XLA_FLAGS": set_before} if set_before else {}
    assert divide_temporary_memory(9, environment)
    assert environment["XLA_FLAGS"].split() == [*set_before.split(), f"{_FLAG}9"]
    assert not divide_temporary_memory(9, environment)
    leave_temporary_memory_whole(9, environment)
    assert environment["XLA_FLAGS"] == set_before


def test_what_the_user_says_of_it_stands() -> None:
    environment = {"XLA_FLAGS": f"{_FLAG}-1"}
    assert not divide_temporary_memory(9, environment)
    assert environment == {"XLA_FLAGS": f"{_FLAG}-1"}


@isolated(env={"XLA_FLAGS": _OURS})
def test_what_the_user_says_is_not_taken_back() -> None:
    # One that has said nothing itself.
    CPUTuning().initialize(xla_adapters.get_runtime().device, spmd=False, tuning=Tuning(keep_memory=False))
    assert _flags() == [_OURS]


@pytest.mark.parametrize(
    ("has_mallopt", "environment", "keep", "keeps"),
    [
        (True, {}, None, True),
        (True, {}, False, False),
        (True, {"MALLOC_TOP_PAD_": "1"}, None, False),
        (True, {"MALLOC_TOP_PAD_": "1"}, True, True),
        (False, {}, None, False),
    ],
)
def test_where_memory_is_kept(has_mallopt: bool, environment: dict[str, str], keep: bool | None, keeps: bool) -> None:
    memory = HostMemory((lambda parameter, value: 1) if has_mallopt else None, environment)
    if keep is not None:
        memory.keep_freed(keep)
    assert memory.keeps() is keeps


@NEEDS_GLIBC
def test_who_imports_the_trainer_has_said_it() -> None:
    # The conftest has, and TrainingArguments start the runtime.
    assert _OURS in _flags()


@NEEDS_GLIBC
@isolated(env={"XLA_FLAGS": ""})
def test_who_starts_the_runtime_by_the_core_says_it(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "xla_adapters"):
        xla_adapters.initialize()
    assert _flags() == [_OURS]
    assert [record for record in caplog.records if "--xla_multiheap_size" in record.getMessage()]


@NEEDS_GLIBC
@isolated(env={"XLA_FLAGS": ""})
def test_who_trains_with_lightning_says_it() -> None:
    strategy = XLAEagerStrategy()
    trainer = L.Trainer(
        strategy=strategy, max_steps=1, logger=False, enable_checkpointing=False, enable_progress_bar=False
    )
    trainer.fit(BoringModel(), torch.utils.data.DataLoader(torch.randn(4, 32)))
    # It is said to nobody once the runtime runs.
    assert _OURS in _flags()


@NEEDS_GLIBC
@pytest.mark.parametrize("name", [*timed_trainers.STOCK, timed_loops.LAZY])
def test_peers_are_measured_without_it(name: str) -> None:
    assert _OURS in _flags()
    assert _OURS not in run_in_child(functools.partial(_flags_of_a_run, name))


@NEEDS_GLIBC
def test_ours_are_measured_with_it() -> None:
    assert _OURS in run_in_child(functools.partial(_flags_of_a_run, timed_trainers.HF_REPLAYED))


def _flags_of_a_run(name: str) -> list[str]:
    """Of a benchmark."""
    runs.run(name, sizes("2x32")[0], Plan(warmup=4, steps=1, rounds=1), lambda: None)
    assert xla_adapters.get_runtime().device.started()
    return _flags()


@isolated
def test_who_does_not_keep_memory_takes_it_whole() -> None:
    xla_adapters.initialize(keep_memory=False)
    assert _OURS not in _flags()


@isolated(env={"XLA_FLAGS": ""})
def test_a_runtime_that_runs_is_told_nothing() -> None:
    xla_adapters.initialize(keep_memory=False)
    assert xla_adapters.get_runtime().device.started()
    xla_adapters.initialize(keep_memory=True)
    xla_adapters.runtime.prepare()
    assert _flags() == []


@isolated(env={"XLA_FLAGS": "", "MALLOC_MMAP_MAX_": "65536"})
def test_who_tells_the_allocator_is_left_alone() -> None:
    xla_adapters.initialize()
    assert _flags() == []


# ---- what comes of it ------------------------------------------------------------------------------------


def _pages_mapped_and_loss() -> tuple[float, float]:
    """In a step with a dozen temporary values of 16 MB; the median of twelve steps."""
    xla_adapters.initialize(keep_memory=True)
    runtime = xla_adapters.get_runtime()
    torch.manual_seed(1)
    weight = torch.nn.Parameter(torch.randn(64, 64).to("xla") / 8)
    value = torch.randn(1 << 16, 64).to("xla")

    @xla_adapters.CompiledStep
    def step(value: torch.Tensor) -> torch.Tensor:
        for _ in range(6):
            value = (value @ weight).sin()
        loss = value.square().sum()
        loss.backward()
        with torch.no_grad():
            weight.sub_(weight.grad, alpha=1e-6)
        weight.grad = None
        return loss.detach()

    mapped = []
    for _ in range(20):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        loss = step(value)
        runtime.device.wait()
        mapped.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    return statistics.median(mapped[8:]), loss.item()


@pytest.mark.long
@NEEDS_GLIBC
def test_more_than_a_heap_holds_is_not_mapped_anew() -> None:
    whole, loss = run_in_child(_pages_mapped_and_loss, env={"XLA_FLAGS": f"{_FLAG}-1"})
    pieces, same = run_in_child(_pages_mapped_and_loss, env={"XLA_FLAGS": _OURS})
    assert whole > 20_000
    assert pieces < 2_000
    assert same == loss


# ---- memory that is mapped anew -------------------------------------------------------------------


_MB = 1 << 20


def _warnings(
    caplog: pytest.LogCaptureFixture, each: Iterable[int], *, could_have_huge_pages: bool = True
) -> list[str]:
    """Of steps that have so much mapped."""
    mapped = [0]
    watch = MappedMemory(mapped=lambda: mapped[0], could_have_huge_pages=lambda: could_have_huge_pages)
    with caplog.at_level(logging.WARNING, "xla_adapters"):
        for more in each:
            mapped[0] += more
            watch.step_ended("train")
    return [record.getMessage() for record in caplog.records]


def test_it_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    (message,) = _warnings(caplog, [110 * _MB] * 300)
    assert message.startswith("train: the system maps 110 MB of memory anew in each step")
    assert "GLIBC_TUNABLES=glibc.malloc.hugetlb=1" in message


def test_the_first_steps_compile(caplog: pytest.LogCaptureFixture) -> None:
    assert _warnings(caplog, [3000 * _MB] * 4 + [_MB] * 300) == []


def test_something_else_compiles(caplog: pytest.LogCaptureFixture) -> None:
    assert _warnings(caplog, [_MB] * 70 + [9000 * _MB] + [_MB] * 300) == []
    assert _warnings(caplog, [_MB] * 120 + [9000 * _MB] + [_MB] * 300) == []


def test_where_the_host_is_ahead(caplog: pytest.LogCaptureFixture) -> None:
    each = [110 * 10 * _MB if step % 10 == 9 else 0 for step in range(300)]
    assert len(_warnings(caplog, each)) == 1


def test_where_nothing_spares_it(caplog: pytest.LogCaptureFixture) -> None:
    assert _warnings(caplog, [300 * _MB] * 300, could_have_huge_pages=False) == []


@pytest.mark.parametrize(
    ("setting", "tunables", "keep", "could"),
    [
        ("always [madvise] never", "", True, True),
        ("always [madvise] never", "glibc.malloc.check=1", True, True),
        ("always [madvise] never", "glibc.malloc.hugetlb=1", True, False),
        ("always madvise [never]", "", True, False),
        ("[always] madvise never", "", True, False),
        (None, "", True, False),
        ("always [madvise] never", "", False, False),
    ],
)
@pytest.mark.skipif(not GLIBC, reason="for glibc")
def test_when_huge_pages_could_be_had(
    tmp_path: Path, setting: str | None, tunables: str, keep: bool, could: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "confstr", lambda name: "glibc 2.35")
    file = tmp_path / "enabled"
    if setting is not None:
        file.write_text(setting)
    memory = HostMemory(lambda parameter, value: 1, {"GLIBC_TUNABLES": tunables}, file)
    memory.keep_freed(keep)
    assert memory.could_have_huge_pages() is could
    monkeypatch.setattr(os, "confstr", lambda name: "glibc 2.34")
    assert not memory.could_have_huge_pages()


def _train(steps: int) -> None:
    """Of a step whose temporary values take 67 MB, which a thread's heap has no room for."""

    # To verify a replay is to wait for the device, which the host is ahead of by another number of steps then.
    @functools.partial(xla_adapters.CompiledStep, config=xla_adapters.XLAConfig(replay_verify_every=None))
    def step(narrow: torch.Tensor) -> torch.Tensor:
        return (narrow @ narrow.T).sum()

    xla_adapters.initialize()
    narrow = torch.ones(4200, 16).to("xla")
    for _ in range(steps):
        step(narrow)
    xla_adapters.get_runtime().device.wait()


@pytest.mark.slow
@NEEDS_GLIBC
@isolated
def test_a_step_that_has_memory_mapped(caplog: pytest.LogCaptureFixture) -> None:
    xla_adapters.initialize(keep_memory=True)
    could = TUNING.could_have_huge_pages()
    with caplog.at_level(logging.WARNING, "xla_adapters"):
        _train(160)
    told = [record.getMessage() for record in caplog.records if "the system maps" in record.getMessage()]
    # Where the system has no such pages to give, there is nothing to say.
    assert len(told) == could
    assert all(message.startswith("step: the system maps ") for message in told)


@NEEDS_GLIBC
@pytest.mark.skipif(
    not HUGE_PAGES.exists() or "[madvise]" not in HUGE_PAGES.read_text(), reason="the system has none to give"
)
@pytest.mark.long
def test_what_is_advised_spares_it() -> None:
    program = (
        "import resource; from tests.cpu import test_process_options as test; test._train(5);"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt; test._train(20);"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)"
    )
    pages = []
    for tunables in ("glibc.malloc.check=0", "glibc.malloc.hugetlb=1"):
        done = subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PJRT_DEVICE": "CPU", "GLIBC_TUNABLES": tunables},
            capture_output=True,
            text=True,
            check=True,
            timeout=200,
        )
        pages.append(int(done.stdout.split()[-1]))
    assert pages[0] > 20 * 17_000
    assert pages[1] < pages[0] / 10
