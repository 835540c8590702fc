"""A step's temporary values lie in pieces that stay with the process, where the runtime is told so in time."""

from __future__ import annotations

import functools
import logging
import os
import resource
import statistics

import lightning as L
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel

import xla_adapters
from benchmarks import runs, timed_loops, timed_trainers
from benchmarks.harness import Plan
from benchmarks.sizes import sizes
from lightning_strategy import XLAEagerStrategy
from tests.cpu.glibc import NEEDS_GLIBC
from tests.isolation import isolated, run_in_child
from xla_adapters.cpu import CPUTuning
from xla_adapters.cpu.process.compiler_flags import divide_temporary_memory, leave_temporary_memory_whole
from xla_adapters.cpu.process.host_memory import HostMemory
from xla_adapters.runtime.tuning import Tuning

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


@pytest.mark.slow
@NEEDS_GLIBC
def test_more_than_a_heap_holds_is_not_mapped_anew() -> None:
    whole, loss = run_in_child(_pages_mapped_and_loss, env={"XLA_FLAGS": f"{_FLAG}-1"})
    pieces, same = run_in_child(_pages_mapped_and_loss, env={"XLA_FLAGS": _OURS})
    assert whole > 20_000
    assert pieces < 2_000
    assert same == loss
