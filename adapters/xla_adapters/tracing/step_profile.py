"""`StepProfile`: records a profile of some calls of a step."""

from __future__ import annotations

import atexit
import logging
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from xla_adapters.config import XLAConfig
from xla_adapters.open_step import in_step
from xla_adapters.runtime import get_runtime
from xla_adapters.tracing.profile_spans import BETWEEN, FORWARD, SPANS

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
