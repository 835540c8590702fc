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


class _Terminal(io.StringIO):
    """A terminal that keeps what is drawn: what is written to a real one can be read at its other end only later."""

    def __init__(self) -> None:
        super().__init__()
        self._controller, self._terminal = os.openpty()
        self._is_drawn = threading.Event()

    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._terminal

    def write(self, text: str) -> int:
        written = super().write(text)
        self._is_drawn.set()
        return written

    def wait_until_drawn(self) -> None:
        assert self._is_drawn.wait(240)

    def close(self) -> None:
        super().close()
        os.close(self._controller)
        os.close(self._terminal)


@contextlib.contextmanager
def _stderr_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Terminal]:
    with contextlib.closing(_Terminal()) as terminal, monkeypatch.context() as patch:
        patch.setattr("sys.stderr", terminal)
        yield terminal


def _step(layers: int) -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 16), nn.Linear(16, 4), nn.Tanh()) for _ in range(layers)))
    model.to(DEVICE)
    # Of a shape that no other step has.
    batch = torch.randn(layers, 4).to(DEVICE)
    for _ in range(3):
        with xla_adapters.step(name="train"):
            loss = model(batch).square().mean()
            loss.backward()


@isolated
def test_a_long_compile_draws_a_line_and_clears_it() -> None:
    with pytest.MonkeyPatch.context() as patch, xla_adapters.eager():
        patch.setattr(compile_progress, "_APPEARS_AFTER", 0.001)
        patch.setattr(compile_progress, "_INTERVAL", 0.001)
        lines: list[str] = []
        # Several updates: the compiler lets other threads run. It may be done before they do, or they be kept waiting.
        for layers in range(8, 108, 10):
            with _stderr_on_a_terminal(patch) as terminal:
                _step(layers)
                lines = terminal.getvalue().split("\r\x1b[2K")
            if len(lines) > 4:
                break
    assert len(lines) > 4
    assert lines[0] == lines[-1] == ""
    assert all(
        re.fullmatch(r"train: compiling for \d+ s, a graph of [1-9]\d* calls of torch", line) for line in lines[1:-1]
    )


def _call() -> tuple[StepSignature, OperationLog]:
    return StepSignature(), OperationLog()


def _is_drawing() -> bool:
    return any(thread.name == compile_progress.THREAD_NAME for thread in threading.enumerate())


def test_only_an_unknown_call_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_progress, "_APPEARS_AFTER", 0.0)
    with _stderr_on_a_terminal(monkeypatch) as terminal:
        with compile_progress.compile_progress("train", GraphHistory(), _call()):
            assert _is_drawing()
            terminal.wait_until_drawn()
    with _stderr_on_a_terminal(monkeypatch) as terminal:
        with compile_progress.compile_progress("train", GraphHistory(known=[_call()]), _call()):
            assert not _is_drawing()
        assert not terminal.getvalue()


def test_a_fast_compile_draws_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_progress, "_APPEARS_AFTER", 600.0)
    with _stderr_on_a_terminal(monkeypatch) as terminal:
        with compile_progress.compile_progress("train", GraphHistory(), _call()):
            pass
        assert not terminal.getvalue()


def test_nothing_is_drawn_into_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_progress, "_APPEARS_AFTER", 0.0)
    stream = io.StringIO()
    with compile_progress.compile_progress("train", GraphHistory(), _call(), stream):
        assert not _is_drawing()
    assert stream.getvalue() == ""


def test_an_error_clears_the_line_and_ends_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_progress, "_APPEARS_AFTER", 0.0)
    with _stderr_on_a_terminal(monkeypatch) as terminal:
        with pytest.raises(KeyError), compile_progress.compile_progress("train", GraphHistory(), _call()):
            terminal.wait_until_drawn()
            raise KeyError
        assert terminal.getvalue().endswith("\r\x1b[2K")
    assert not _is_drawing()
