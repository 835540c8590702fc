"""What the wall clock counts time to, and the steps that were slow, with their cause."""

from __future__ import annotations

import pytest

from xla_adapters.insight.times import CALLBACKS, COMPILE, INPUT, KINDS, OTHER, SAVE, SETUP, STEP, StepTimes, WallClock


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


class Run:
    def __init__(self) -> None:
        self.now = 0.0
        self.clock = WallClock(lambda: self.now)
        self.clock.start()
        self.now += 50
        self.times = StepTimes(self.clock)
        self.times.begin()

    def step(self, *, input: float = 0.25, compute: float = 1.0, save: float = 0.0) -> None:
        for kind, seconds in ((INPUT, input), (STEP, compute), (SAVE, save)):
            with self.clock.during(kind):
                self.now += seconds
        self.times.step_ended()


def test_slow_steps_have_a_cause() -> None:
    run = Run()
    for number in range(100):
        run.step(input=9 if number == 40 else 0.25, save=20 if number == 70 else 0)
    slow = {item.step: (item.cause, item.cause_seconds, item.seconds) for item in run.times.slow}
    assert slow == {41: ("input wait", 9, 10), 71: ("saves", 20, 21.25)}
    found = run.times.percentiles()
    assert (found["p50"], found["p90"], found["slowest"]) == (1.25, 1.25, 21.25)
    assert str(run.times.slow[-1]) == "step 71: 21.250 s, of which saves 20.000 s"


def test_the_setup_is_no_part_of_a_step() -> None:
    run = Run()
    run.step()
    assert list(run.times.seconds) == [1.25]


def test_the_curve_keeps_the_slowest_of_each_group() -> None:
    run = Run()
    for number in range(1000):
        run.step(compute=5 if number == 999 else 1)
    curve = run.times.curve(points=10)
    assert len(curve) == 10
    assert [point["step"] for point in curve][:2] == [1, 101]
    assert [point["slowest"] for point in curve] == [1.25] * 9 + [5.25]
    assert {point["median"] for point in curve} == {1.25}


def test_the_curve_leaves_out_steps_that_compiled() -> None:
    time = Time()
    clock = WallClock(time)
    clock.start(STEP)
    times = StepTimes(clock)
    for compiling in (True, False, False, True, False):
        time.now += 1
        if compiling:
            clock.move(0.5, COMPILE)
        times.step_ended()
    assert [point["step"] for point in times.curve()] == [2, 3, 5]


def test_a_run_with_many_slow_steps_keeps_the_slowest() -> None:
    run = Run()
    for _ in range(8):
        run.step()
    for number in range(1500):
        # Twice as slow as all before, again and again.
        run.step(compute=1.0 if number % 5 else 10.0 + number)
    assert len(run.times.slow) == 200
    assert max(item.seconds for item in run.times.slow) == max(run.times.seconds)


def test_no_step() -> None:
    run = Run()
    assert run.times.percentiles() == {}
    assert run.times.as_dict() == {"steps": 0, "slow": []}
    assert run.times.curve() == []
