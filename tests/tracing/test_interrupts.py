"""Ctrl-C at each place of a step's Python: what a step sets is put back, whatever is interrupted."""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

import xla_adapters
from tests.isolation import isolated
from tests.support import Loop, differences, flags, state_of
from xla_adapters.replay.step_program import StepProgram
from xla_adapters.tracing.discarding import Discarding

pytestmark = pytest.mark.isolated

Place = tuple[str, int, str]

_CORE = str(Path(inspect.getfile(xla_adapters)).parent)
# What a step enters and leaves while its body runs, and what enters and leaves it.
_EDGES = (
    *(
        f"{_CORE}/tracing/{name}.py"
        for name in ("discarding", "interrupts", "step", "step_mode", "step_scope", "updates")
    ),
    *(f"{_CORE}/{name}.py" for name in ("replay/garbage", "utils/compiling", "utils/patching")),
    *(inspect.getfile(module) for module in (contextlib, torch.overrides, torch.autograd.grad_mode)),
    inspect.getfile(torch.amp.autocast),
)


class Tracer:
    """Notes the places that are passed, or interrupts at one of them, once."""

    def __init__(self, target: Place | None = None) -> None:
        self.places: set[Place] = set()
        self.target = target

    def __call__(self, frame: FrameType, event: str, arg: object) -> Tracer:
        place = frame.f_code.co_filename, frame.f_lineno, event
        if self.target is None:
            self.places.add(place)
        elif place == self.target:
            self.target = None
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


class Other(TorchFunctionMode):
    """A mode of somebody else's, who is around the steps."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def passed(run: Callable[[], object]) -> list[Place]:
    """The places of a run, in an order that does not depend on where packages are installed."""
    tracer = Tracer()
    with tracer.tracing():
        run()
    return sorted(tracer.places, key=lambda place: (Path(place[0]).name, *place))


def switches() -> dict[str, Any]:
    """What is the process's, and must be put back."""
    return flags() | {
        "gradients": torch.is_grad_enabled(),
        "seen by function modes": torch._C._get_torch_function_state(),
        "autocast": (torch.is_autocast_enabled("xla"), torch.get_autocast_dtype("xla")),
        "nesting": (torch.autocast_increment_nesting(), torch.autocast_decrement_nesting()),
        "autocast's cache": torch.is_autocast_cache_enabled(),
        "handler": signal.getsignal(signal.SIGINT),
        "modes": _get_current_function_mode_stack(),
        "collecting": gc.isenabled(),
    }


def check(run: Callable[[], object], loop: Loop, places: list[Place], around: Any = None) -> int:
    """Interrupts a run at each place, in a context; returns how often that discarded it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    discarded = interrupted = 0
    # Of a long training: its gradients may have come to be zero, and weights decay all the same.
    whole = {"optimizer 0 0 step", "model first.weight", "model last.weight"}
    with around or contextlib.nullcontext():
        switches_before = switches()
        for place in places:
            before = state_of(loop.model, loop.optimizer)
            tracer = Tracer(place)
            try:
                with tracer.tracing():
                    run()
            except KeyboardInterrupt:
                # Whoever holds the error holds what it has interrupted.
                with_error = switches()
            else:
                with_error = switches_before
            assert with_error == switches() == switches_before, place
            interrupted += tracer.target is None
            changed = differences(before, state_of(loop.model, loop.optimizer))
            discarded += not changed
            # All of the step, or nothing.
            assert not changed or whole <= set(changed), (place, changed)
    # A few come by chance, or once only: what is logged or looked up the first time.
    assert interrupted > 0.9 * len(places)
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


def test_where_an_update_begins_and_ends() -> None:
    with xla_adapters.eager():
        loop, run = loop_of_steps()
        files = ("/step_hooks.py", "/torch_xla/tracing.py")
        places = [place for place in passed(run) if place[0].endswith(files) and place[2] == "line"]
        assert len(places) > 40
        assert check(run, loop, places) > 30
        run()


@pytest.mark.slow
@isolated(timeout=600)
def test_where_a_traced_step_enters_and_leaves() -> None:
    with xla_adapters.eager():
        loop, run = loop_of_steps()
        places = [place for place in passed(run) if place[0] in _EDGES]
        assert len(places) > 200
        assert check(run, loop, places[::2], Other()) > 50
        run()


@isolated(timeout=500)
@pytest.mark.slow
def test_everywhere_in_a_traced_step() -> None:
    with xla_adapters.eager():
        loop, run = loop_of_steps()
        places = passed(run)
        assert len(places) > 1500
        # All that a step enters and leaves is in the test above.
        assert check(run, loop, places[::6], Other()) > 160
        run()


@isolated(timeout=600)
def test_everywhere_in_a_replayed_step() -> None:
    with xla_adapters.eager():
        loop = Loop()
        model, optimizer = loop.model, loop.optimizer

        @functools.partial(xla_adapters.CompiledStep, config=xla_adapters.XLAConfig(replay_verify_every=None))
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
        places = passed(run)
        assert len(places) > 300
        assert check(run, loop, places) > 100
        run()


def test_autocast_forgets_what_it_cast_in_a_discarded_step() -> None:
    def loss_of(*, discarded_before: bool) -> float:
        loop = Loop()
        with torch.autocast("xla", torch.bfloat16):
            if discarded_before:
                with pytest.raises(ValueError, match="mine"), xla_adapters.step():
                    loop.forward()
                    raise ValueError("mine")
            with xla_adapters.step(seed=xla_adapters.StepSeed(seed=1, step=0)):
                loss = loop.body()
        return loss.item()

    with xla_adapters.eager():
        assert loss_of(discarded_before=True) == loss_of(discarded_before=False)


def test_a_step_that_raises_inside_an_autocast_leaves_it_in_order() -> None:
    """Its edges stand at another depth than the place where it is discarded."""
    with xla_adapters.eager():
        loop, program = Loop(), StepProgram("step", xla_adapters.XLAConfig())
        program.open()
        with torch.autocast("xla", torch.bfloat16), torch.no_grad():
            with pytest.raises(ValueError, match="mine"), Discarding(program):
                loop.forward()
                raise ValueError("mine")
            assert torch.is_autocast_enabled("xla")
            assert not torch.is_grad_enabled()
        assert switches()["nesting"] == (1, 0)
        assert not program.is_open


class Interrupts:
    """Python ignores exceptions of `__del__`."""

    def __del__(self) -> None:
        signal.raise_signal(signal.SIGINT)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_that_gets_lost_ends_the_step() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with xla_adapters.eager():
        loop = Loop()
        before = state_of(loop.model, loop.optimizer)
        with pytest.raises(KeyboardInterrupt), xla_adapters.step():
            lost = [Interrupts()]
            lost.clear()
            loop.body()
        assert not differences(before, state_of(loop.model, loop.optimizer))
        with xla_adapters.step():
            loop.body()
        assert differences(before, state_of(loop.model, loop.optimizer))


def test_a_handler_set_in_a_step_that_hands_on_to_that_before() -> None:
    """It holds nothing back any more when the step is over."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with xla_adapters.eager():
        loop = Loop()
        with xla_adapters.step():
            before: Any = signal.getsignal(signal.SIGINT)
            signal.signal(signal.SIGINT, lambda number, frame: before(number, frame))
            loop.body()
        runtime = xla_adapters.get_runtime()
        finish = runtime.tracing.finish_step

        def interrupted_finish() -> None:
            signal.raise_signal(signal.SIGINT)
            finish()

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(runtime.tracing, "finish_step", interrupted_finish)
            with pytest.raises(KeyboardInterrupt), xla_adapters.step():
                loop.body()
