"""`StepProfile`: records profiles of some calls of a step: of given ones, after a signal, and after slow calls."""

from __future__ import annotations

import atexit
import logging
import os
import signal
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from time import perf_counter
from types import FrameType
from typing import Any

from xla_adapters.config import XLAConfig
from xla_adapters.open_step import in_step
from xla_adapters.runtime import get_runtime
from xla_adapters.runtime.waiting_steps import settle
from xla_adapters.tracing.profile_spans import BETWEEN, FORWARD, SPANS

logger = logging.getLogger("xla_adapters")

# So many calls are recorded after a signal or a slow call.
LENGTH = 3
# A call is slow if it takes so many times the median of those before it, of which there must be a few.
_SLOW, _FEWEST, _WINDOW = 3.0, 8, 64
# Of each step; a machine that others use, too, has slow calls again and again.
_MOST_SLOW = 3

# Of the steps in loops of one's own: `with step():` makes a new object for each call.
_by_place: dict[tuple[str, str], StepProfile] = {}
# How often each signal that is listened to has come.
_arrived: dict[int, int] = {}


class StepProfile:
    """The profiles of one step. Each begins before a call and is written after one.

    Calls inside another step do not count.

    Args:
        name: of the step, for messages.
        config: with the `profile_` options.
    """

    def __init__(self, name: str, config: XLAConfig) -> None:
        assert config.has_profiles
        self._name = name
        self._first, self._last = config.profile_steps or (0, 0)
        self._signal = signal.Signals[config.profile_signal] if config.profile_signal is not None else None
        self._finds_slow = config.profile_slow_steps
        self._folder = os.path.abspath(config.profile_folder or "xla-profile")
        self._calls = 0
        # The calls of the profile that is being recorded, and why.
        self._from = self._until = 0
        self._why = ""
        self._is_recording = False
        self._answered = _listen_to(self._signal) if self._signal is not None else 0
        self._seconds: deque[float] = deque(maxlen=_WINDOW)
        self._slow = ""
        self._slow_profiles = 0
        self._began = 0.0
        self._compiled = 0

    def before_call(self) -> None:
        """A call is about to be opened."""
        if in_step():
            return
        self._calls += 1
        if not self._is_recording:
            self._start_if_asked()
        if self._is_recording:
            SPANS.end(BETWEEN)
            SPANS.begin(f"{self._name} {self._calls}")
        if self._finds_slow:
            self._compiled = get_runtime().counters.executables_compiled()
            self._began = perf_counter()

    def _start_if_asked(self) -> None:
        if self._calls == self._first:
            self._start(self._last, f"profile_steps={(self._first, self._last)}")
        elif self._signal is not None and _arrived[self._signal] != self._answered:
            self._answered = _arrived[self._signal]
            self._start(self._calls + LENGTH - 1, self._signal.name)
        elif self._slow:
            why, self._slow = self._slow, ""
            self._slow_profiles += 1
            self._start(self._calls + LENGTH - 1, why)

    def _start(self, until: int, why: str) -> None:
        runtime = get_runtime()
        runtime.device.initialize()
        settle("a profile begins")
        # What earlier calls left to the device is no part of the profile.
        runtime.device.wait()
        self._from, self._until, self._why = self._calls, until, why
        self._is_recording = runtime.device.start_profile(self._folder)
        if self._is_recording:
            SPANS.start()
            # A script may end before the last of the calls.
            atexit.register(self.stop)
        else:
            logger.warning("%s: %s has no effect, since a profile is being recorded already", self._name, why)

    def name_span(self, name: str) -> None:
        """What the call begins with, if it is in the profile: it is traced, or replayed."""
        if self._is_recording and not in_step():
            SPANS.begin(name)

    def after_call(self) -> None:
        """A call has ended."""
        if in_step():
            return
        if self._finds_slow:
            self._note_time(perf_counter() - self._began)
        if self._is_recording:
            SPANS.end_all()
            SPANS.begin(BETWEEN)
            if self._calls >= self._until:
                self.stop()

    def _note_time(self, seconds: float) -> None:
        # A compile has its own explanation, and the recording itself slows calls down.
        if self._is_recording or get_runtime().counters.executables_compiled() != self._compiled:
            return
        known = sorted(self._seconds)
        self._seconds.append(seconds)
        if len(known) < _FEWEST or self._slow_profiles >= _MOST_SLOW:
            return
        median = known[len(known) // 2]
        if seconds > _SLOW * median:
            self._slow = f"step {self._calls} took {seconds:.3f} s, where the median is {median:.3f} s"

    def stop(self) -> None:
        """Writes the profile, if one is being recorded: after its last call, an error, or the end of the run."""
        if not self._is_recording:
            return
        self._is_recording = False
        SPANS.stop()
        atexit.unregister(self.stop)
        settle("a profile ends")
        runtime = get_runtime()
        runtime.device.wait()
        runtime.device.stop_profile()
        logger.info(
            "%s: the profile of the steps %d to %d is in %s (%s); `pip install xprof` and `xprof --logdir %s` show it, "
            "or open its .trace.json.gz at https://ui.perfetto.dev",
            self._name,
            self._from,
            min(self._calls, self._until),
            self._folder,
            self._why,
            self._folder,
        )


def _listen_to(number: signal.Signals) -> int:
    """Counts a signal from now on, for the rest of the process; returns how often it has come."""
    if number in _arrived:
        return _arrived[number]
    if threading.current_thread() is not threading.main_thread():
        logger.warning("profile_signal=%s has no effect: the first step is not in the main thread", number.name)
        return _arrived.setdefault(number, 0)
    _arrived[number] = 0
    former = signal.getsignal(number)

    def count(received: int, frame: FrameType | None) -> None:
        _arrived[number] += 1
        if callable(former):
            former(received, frame)

    signal.signal(number, count)
    return 0


@contextmanager
def profiled(scope: AbstractContextManager[Any], name: str, place: str, config: XLAConfig) -> Iterator[None]:
    """The context of one call of a step, as a part of the profile of all calls of this name at this place."""
    key = (name, place)
    if key not in _by_place:
        _by_place[key] = StepProfile(name, config)
    profile = _by_place[key]
    profile.before_call()
    profile.name_span(FORWARD)
    try:
        with scope:
            yield
    except BaseException:
        profile.stop()
        raise
    profile.after_call()
