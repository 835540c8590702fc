"""`StepProfile`: records a profile of some calls of a step."""

from __future__ import annotations

import atexit
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from xla_adapters.config import XLAConfig
from xla_adapters.open_step import in_step
from xla_adapters.runtime import get_runtime

# What the host does gets a name in a profile: the step, in it forward, backward and optimizer, and what is between
# steps. A step that is replayed is one span, `replay`. While no profile is recorded, none of this does anything.
FORWARD, BACKWARD, OPTIMIZER, REPLAY = "forward", "backward", "optimizer", "replay"
BETWEEN = "data and other code between steps"


class ProfileSpans:
    """The spans that are open in the profile that is being recorded. A process records one profile at a time."""

    def __init__(self) -> None:
        self._is_recording = False
        self._open: dict[str, Callable[[], None]] = {}

    def start(self) -> None:
        """A profile is being recorded from now on."""
        self._is_recording = True

    def stop(self) -> None:
        """Ends all spans: the profile is about to end."""
        self.end_all()
        self._is_recording = False

    def begin(self, name: str) -> None:
        """Begins a span, and ends the forward: whatever has a name of its own is no part of it."""
        if self._is_recording:
            self.end(FORWARD)
            self.end(name)
            self._open[name] = get_runtime().device.mark_profile(name)

    def end(self, name: str) -> None:
        """Ends a span, if it is open."""
        if name in self._open:
            self._open.pop(name)()

    def end_all(self) -> None:
        """Ends the spans that are open, the last one first."""
        for name in reversed(list(self._open)):
            self.end(name)


SPANS = ProfileSpans()

logger = logging.getLogger("xla_adapters")

# Of the steps in loops of one's own: `with step():` makes a new object for each call.
_by_place: dict[tuple[str, str], StepProfile] = {}


class StepProfile:
    """The profile of one step. It begins before a call and is written after one.

    Calls inside another step do not count.

    Args:
        name: of the step, for messages.
        config: with `profile_steps`.
    """

    def __init__(self, name: str, config: XLAConfig) -> None:
        assert config.profile_steps is not None
        self._name = name
        self._first, self._last = config.profile_steps
        self._folder = os.path.abspath(config.profile_folder or "xla-profile")
        self._calls = 0
        self._is_recording = False

    def before_call(self) -> None:
        """A call is about to be opened."""
        if in_step():
            return
        self._calls += 1
        if self._calls == self._first:
            self._start()
        if self._is_recording:
            SPANS.end(BETWEEN)
            SPANS.begin(f"{self._name} {self._calls}")

    def _start(self) -> None:
        runtime = get_runtime()
        runtime.device.initialize()
        # What earlier calls left to the device is no part of the profile.
        runtime.device.wait()
        self._is_recording = runtime.device.start_profile(self._folder)
        if self._is_recording:
            SPANS.start()
            # A script may end before the last of the calls.
            atexit.register(self.stop)
        else:
            steps = self._first, self._last
            logger.warning(
                "%s: profile_steps=%s has no effect, since a profile is being recorded already", self._name, steps
            )

    def name_span(self, name: str) -> None:
        """What the call begins with, if it is in the profile: it is traced, or replayed."""
        if self._is_recording and not in_step():
            SPANS.begin(name)

    def after_call(self) -> None:
        """A call has ended."""
        if in_step():
            return
        if self._is_recording:
            SPANS.end_all()
            SPANS.begin(BETWEEN)
            if self._calls >= self._last:
                self.stop()

    def stop(self) -> None:
        """Writes the profile, if one is being recorded: after its last call, an error, or the end of the run."""
        if not self._is_recording:
            return
        self._is_recording = False
        SPANS.stop()
        atexit.unregister(self.stop)
        runtime = get_runtime()
        runtime.device.wait()
        runtime.device.stop_profile()
        logger.info(
            "%s: the profile of the steps %d to %d is in %s; `pip install xprof` and `xprof --logdir %s` show it, "
            "or open its .trace.json.gz at https://ui.perfetto.dev",
            self._name,
            self._first,
            min(self._calls, self._last),
            self._folder,
            self._folder,
        )


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
