"""`WallClock` divides all of the time, and nothing twice."""

from __future__ import annotations

import pytest

from xla_adapters.insight.times import CALLBACKS, COMPILE, INPUT, KINDS, OTHER, SETUP, STEP, WallClock


class Time:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def named(clock: WallClock) -> dict[str, float]:
    return {name: seconds for name, seconds in zip(KINDS, clock.update(), strict=True) if seconds}


def test_time_goes_to_what_is_done_now() -> None:
    time = Time()
    clock = WallClock(time)
    clock.start()
    time.now += 1
    assert clock.switch(STEP) == SETUP
    time.now += 2
    with clock.during(CALLBACKS):
        time.now += 4
        with clock.during(INPUT):
            time.now += 8
        time.now += 16
    clock.end(CALLBACKS)
    time.now += 32
    clock.end(STEP)
    time.now += 64
    assert named(clock) == {
        "setup": 1,
        "steps": 2 + 32,
        "callbacks": 4 + 16,
        "input wait": 8,
        "other host code": 64,
    }


def test_a_compile_is_taken_out_of_the_step() -> None:
    time = Time()
    clock = WallClock(time)
    clock.start(STEP)
    time.now += 10
    clock.move(7, COMPILE)
    assert named(clock) == {"steps": 3, "compile": 7}


def test_an_error_inside_goes_back_to_what_was_done() -> None:
    time = Time()
    clock = WallClock(time)
    clock.start(OTHER)
    with pytest.raises(ValueError, match="no"), clock.during(INPUT):
        time.now += 1
        raise ValueError("no")
    time.now += 2
    assert named(clock) == {"input wait": 1, "other host code": 2}


def test_without_a_run_nothing_is_counted() -> None:
    time = Time()
    clock = WallClock(time)
    with clock.during(STEP):
        time.now += 1
    clock.move(1, COMPILE)
    assert named(clock) == {}
    clock.start()
    time.now += 1
    clock.stop()
    time.now += 1
    assert named(clock) == {"setup": 1}
