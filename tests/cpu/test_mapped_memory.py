"""A step whose memory the system maps anew each time is named, with what spares it."""

from __future__ import annotations

import functools
import logging
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

import xla_adapters
from tests.cpu.glibc import GLIBC, HUGE_PAGES, NEEDS_GLIBC
from tests.isolation import isolated
from xla_adapters.cpu import TUNING
from xla_adapters.cpu.process.host_memory import HostMemory
from xla_adapters.cpu.process.mapped_memory import MappedMemory

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
@pytest.mark.slow
def test_what_is_advised_spares_it() -> None:
    program = (
        "import resource; from tests.cpu import test_mapped_memory as test; test._train(5);"
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
