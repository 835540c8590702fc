"""The live line while a step compiles: on a terminal only, and gone at the end."""

from __future__ import annotations

import contextlib
import io
import os
import re
import threading
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import xla_adapters
from tests.device import DEVICE
from tests.isolation import isolated
from xla_adapters.tracing import compile_progress
from xla_adapters.tracing.graph_history import GraphHistory, StepSignature
from xla_adapters.tracing.operation_log import OperationLog


@contextlib.contextmanager
def _stderr_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Gives the end from which what is drawn can be read."""
    controller, terminal = os.openpty()
    os.set_blocking(controller, False)
    with os.fdopen(terminal, "w") as stream:
        monkeypatch.setattr("sys.stderr", stream)
        yield controller
    os.close(controller)


def _drawn(controller: int) -> str:
    try:
        return os.read(controller, 100_000).decode()
    except BlockingIOError:
        return ""


def _step(width: int) -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, width), nn.Linear(width, 4), nn.Tanh()) for _ in range(8)))
    model.to(DEVICE)
    batch = torch.randn(3, 4).to(DEVICE)
    for _ in range(3):
        with xla_adapters.step(name="train"):
            loss = model(batch).square().mean()
            loss.backward()


@isolated
def test_a_long_compile_draws_a_line_and_clears_it() -> None:
    with pytest.MonkeyPatch.context() as patch, xla_adapters.eager():
        patch.setattr(compile_progress, "_PATIENCE", 0.01)
        patch.setattr(compile_progress, "_INTERVAL", 0.01)
        with _stderr_on_a_terminal(patch) as controller:
            _step(16)
            drawn = _drawn(controller)
    lines = drawn.split("\r\x1b[2K")
    assert lines[0] == lines[-1] == ""
    # Several updates: the compiler lets other threads run.
    assert len(lines) > 4
    assert all(
        re.fullmatch(r"train: compiling for \d+ s, a graph of [1-9]\d* calls of torch", line) for line in lines[1:-1]
    )


def _draws(patch: pytest.MonkeyPatch, history: GraphHistory, seconds: float = 0.05) -> str:
    patch.setattr(compile_progress, "_PATIENCE", 0.0)
    with _stderr_on_a_terminal(patch) as controller:
        with compile_progress.compile_progress("train", history, (StepSignature(), OperationLog())):
            threading.Event().wait(seconds)
        return _drawn(controller)


def test_only_an_unknown_call_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _draws(monkeypatch, GraphHistory())
    history = GraphHistory(known=[(StepSignature(), OperationLog())])
    assert not _draws(monkeypatch, history)


def test_a_fast_compile_draws_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with _stderr_on_a_terminal(monkeypatch) as controller:
        with compile_progress.compile_progress("train", GraphHistory(), (StepSignature(), OperationLog())):
            pass
        assert not _drawn(controller)


def test_nothing_is_drawn_into_a_file_and_an_error_ends_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_progress, "_PATIENCE", 0.0)
    call = (StepSignature(), OperationLog())
    stream = io.StringIO()
    with compile_progress.compile_progress("train", GraphHistory(), call, stream):
        threading.Event().wait(0.02)
    assert stream.getvalue() == ""
    before = threading.active_count()
    with _stderr_on_a_terminal(monkeypatch) as controller:
        with pytest.raises(KeyError), compile_progress.compile_progress("train", GraphHistory(), call):
            threading.Event().wait(0.02)
            raise KeyError
        assert _drawn(controller).endswith("\r\x1b[2K")
    assert threading.active_count() == before
