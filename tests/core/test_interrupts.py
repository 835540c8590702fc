"""Ctrl-C at each place of a step's Python: what a step sets is put back, whatever is interrupted."""

from __future__ import annotations

import contextlib
import functools
import inspect
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import xla_adapters
from tests.core.support import Loop, differences, flags, state_of
from tests.isolation import isolated

Place = tuple[str, int, str]

_CORE = str(Path(inspect.getfile(xla_adapters)).parent)
# What a step enters and leaves while its body runs, and what enters and leaves it.
_EDGES = (
    *(f"{_CORE}/{name}.py" for name in ("interrupts", "program", "step", "updates", "watch", "waiting_steps")),
    *(f"{_CORE}/replay/{name}.py" for name in ("garbage", "passes")),
    *(inspect.getfile(module) for module in (contextlib, torch.overrides, torch.autograd.grad_mode)),
    inspect.getfile(torch.amp.autocast),
)


class Tracer:
    """Notes the places that are passed, or interrupts at one of them, once."""

    def __init__(self, target: Place | None = None) -> None:
        self.places: set[Place] = set()
        self._target = target

    def __call__(self, frame: FrameType, event: str, arg: object) -> Tracer:
        place = frame.f_code.co_filename, frame.f_lineno, event
        if self._target is None:
            self.places.add(place)
        elif place == self._target:
            self._target = None
            signal.raise_signal(signal.SIGINT)
        return self

    @contextlib.contextmanager
    def tracing(self) -> Iterator[None]:
        """Traces the Python of this thread."""
        sys.settrace(self)
        try:
            yield
        finally:
            sys.settrace(None)


def passed(run: Callable[[], object]) -> set[Place]:
    """The places of a run."""
    tracer = Tracer()
    with tracer.tracing():
        run()
    return tracer.places


def interrupted(run: Callable[[], object], place: Place) -> None:
    """Runs with Ctrl-C at a place; it may be held back until the end."""
    with contextlib.suppress(KeyboardInterrupt), Tracer(place).tracing():
        run()


def switches() -> dict[str, Any]:
    """What is the process's, and must be put back."""
    return flags() | {
        "gradients": torch.is_grad_enabled(),
        "autocast": (
            torch.is_autocast_enabled("xla"),
            torch.autocast_increment_nesting(),
            torch.autocast_decrement_nesting(),
        ),
        "handler": signal.getsignal(signal.SIGINT),
    }


def check(run: Callable[[], object], loop: Loop, places: list[Place]) -> int:
    """Interrupts a run at each place; returns how often that discarded it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    switches_before, discarded = switches(), 0
    for place in places:
        before = state_of(loop.model, loop.optimizer)
        interrupted(run, place)
        assert switches() == switches_before, place
        changed = differences(before, state_of(loop.model, loop.optimizer))
        discarded += not changed
        # All of the step, or nothing.
        assert not changed or {"optimizer 0 0 step", "model first.weight"} <= set(changed), place
    return discarded


def loop_of_steps() -> tuple[Loop, Callable[[], object]]:
    """A loop, and a step of it that uses an autocast and a `no_grad`."""
    loop = Loop()

    def run() -> None:
        with xla_adapters.step(seed=xla_adapters.StepSeed(seed=1, step=0)):
            with torch.autocast("xla", torch.bfloat16):
                loss = loop.forward()
            loss.backward()
            loop.optimizer.step()
            loop.optimizer.zero_grad()

    for _ in range(2):
        run()
    return loop, run


@isolated
def test_where_a_traced_step_enters_and_leaves() -> None:
    with xla_adapters.eager():
        loop, run = loop_of_steps()
        places = sorted(place for place in passed(run) if place[0] in _EDGES)
        assert len(places) > 200
        assert check(run, loop, places) > 100
        run()


@isolated(timeout=900)
@pytest.mark.slow
def test_everywhere_in_a_traced_step() -> None:
    with xla_adapters.eager():
        loop, run = loop_of_steps()
        places = sorted(passed(run))
        assert len(places) > 1500
        assert check(run, loop, places) > 1000
        run()


@isolated
def test_everywhere_in_a_replayed_step() -> None:
    with xla_adapters.eager():
        loop = Loop()
        model, optimizer = loop.model, loop.optimizer

        @functools.partial(xla_adapters.CompiledStep, config=xla_adapters.XLAConfig(replay_verify_every=10_000))
        def step(batch: torch.Tensor) -> torch.Tensor:
            loss = model.last(model.dropout(torch.relu(model.first(batch)))).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        def run() -> None:
            replays = step.replays
            step(loop.batch)
            assert step.replays == replays + 1

        for _ in range(4):
            step(loop.batch)
        run()
        places = sorted(passed(run))
        assert len(places) > 300
        check(run, loop, places)
        run()


@isolated
def test_autocast_forgets_what_it_cast_in_a_discarded_step() -> None:
    with xla_adapters.eager():
        loop = Loop()
        losses = []
        with torch.autocast("xla", torch.bfloat16):
            with pytest.raises(ValueError, match="mine"), xla_adapters.step():
                loop.forward()
                raise ValueError("mine")
            with xla_adapters.step():
                losses.append(loop.body())
        assert losses[0].isfinite().item()
