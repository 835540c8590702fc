"""`StepProfile`: records the device's profile of some calls of a step, for `profile_steps`."""

from __future__ import annotations

import atexit
import logging
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from xla_adapters.config import XLAConfig
from xla_adapters.runtime import get_runtime
from xla_adapters.runtime.waiting_steps import settle
from xla_adapters.tracing.step_scope import in_step

logger = logging.getLogger("xla_adapters")

# Of the steps in loops of one's own: `with step():` makes a new object for each call.
_by_place: dict[tuple[str, str], StepProfile] = {}


class StepProfile:
    """The profile of the calls `profile_steps` of one step: begins before the first and is written after the last.

    Calls inside another step do not count.

    Args:
        name: of the step, for messages.
        config: with `profile_steps` and `profile_folder`.
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
        if self._calls != self._first:
            return
        runtime = get_runtime()
        runtime.device.initialize()
        settle("a profile begins")
        # What earlier calls left to the device is no part of the profile.
        runtime.device.wait()
        self._is_recording = runtime.device.start_profile(self._folder)
        if self._is_recording:
            # A script may end before the last of the calls.
            atexit.register(self.stop)
        else:
            logger.warning(
                "%s: profile_steps=%s has no effect, since a profile is being recorded already",
                self._name,
                (self._first, self._last),
            )

    def after_call(self) -> None:
        """A call has ended."""
        if self._is_recording and self._calls >= self._last and not in_step():
            self.stop()

    def stop(self) -> None:
        """Writes the profile, if one is being recorded: after its last call, an error, or the end of the run."""
        if not self._is_recording:
            return
        self._is_recording = False
        atexit.unregister(self.stop)
        settle("a profile ends")
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
    try:
        with scope:
            yield
    except BaseException:
        profile.stop()
        raise
    profile.after_call()
