"""`CheckpointConfig`: when to save checkpoints, which to keep, and how long to wait."""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Any, Literal, get_args

from xla_adapters.errors import ConfigError

SaveOn = Literal["preemption"]


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """How a run saves its checkpoints.

    Args:
        every_n_steps: save whenever this many optimizer steps are done.
        every: save when this much time has passed since the last save began.
        save_on: `"preemption"` also saves when one of `preemption_signals` has arrived, then ends the run.
        asynchronous: write in the background; the training loop waits only for the copy to the host.
        keep_last: keep this many of the newest checkpoints; `None` keeps all. Older ones are deleted only after a
            newer one has been read back and verified.
        keep_every: also keep older checkpoints whose step is a multiple of this.
        preemption_signals: names of the signals that announce the end of the process.
        preemption_deadline: time from the signal to the end of the process; no save is started after it.
        preemption_exit_code: exit status of the process after such a save; `None` for 128 + the signal's number,
            as a shell reports a process that was ended by the signal (143 for SIGTERM).
        stall_deadline: a step, a save or a barrier that takes longer raises `StallError`, and the stacks of all
            threads are printed; `None` waits forever.

    Raises:
        ConfigError: a value cannot work.
    """

    every_n_steps: int | None = None
    every: timedelta | None = None
    save_on: SaveOn | None = None
    asynchronous: bool = False
    keep_last: int | None = None
    keep_every: int | None = None
    preemption_signals: tuple[str, ...] = ("SIGTERM",)
    preemption_deadline: timedelta | None = None
    preemption_exit_code: int | None = None
    stall_deadline: timedelta | None = None

    def __post_init__(self) -> None:
        for name in ("every_n_steps", "keep_last", "keep_every"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ConfigError(f"{name}={value!r} is not a valid value; valid values: None or an integer >= 1")
        for name in ("every", "preemption_deadline", "stall_deadline"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, timedelta) or value <= timedelta(0)):
                raise ConfigError(f"{name}={value!r} is not a valid value; valid values: None or a timedelta > 0")
        if self.save_on not in (None, *get_args(SaveOn)):
            raise ConfigError(f"save_on={self.save_on!r} is not a valid value; valid values: None, 'preemption'")
        if not isinstance(self.asynchronous, bool):
            raise ConfigError(f"asynchronous={self.asynchronous!r} is not a valid value; valid values: True, False")
        code = self.preemption_exit_code
        if code is not None and (isinstance(code, bool) or not isinstance(code, int) or not 0 <= code <= 255):
            raise ConfigError(f"preemption_exit_code={code!r} is not a valid value; valid values: None, 0 to 255")
        if self.keep_every is not None and self.keep_last is None:
            raise ConfigError("keep_every says what else to keep than keep_last, which is None: everything is kept")
        self.signals()

    def signals(self) -> tuple[signal.Signals, ...]:
        """The signals of `preemption_signals`.

        Raises:
            ConfigError: a signal does not exist on this machine, or cannot be handled.
        """
        cannot = {"SIGKILL", "SIGSTOP"}
        valid = sorted(known.name for known in signal.Signals if known.name not in cannot)
        wrong = [name for name in self.preemption_signals if name not in valid]
        if wrong or not self.preemption_signals:
            raise ConfigError(
                f"preemption_signals={self.preemption_signals!r} is not a valid value; valid are: {', '.join(valid)}"
            )
        return tuple(signal.Signals[name] for name in self.preemption_signals)

    @classmethod
    def resolve(cls, given: CheckpointConfig | Mapping[str, Any] | str | None) -> CheckpointConfig:
        """Accepts a config, a dict of its options, or the dict as a JSON string; `None` gives the defaults.

        Raises:
            ConfigError: `given` is none of these, or a value is not valid.
        """
        if isinstance(given, CheckpointConfig):
            return given
        if isinstance(given, str):
            try:
                given = json.loads(given)
            except json.JSONDecodeError as error:
                raise ConfigError(f"checkpoint={given!r} is not JSON: {error}") from error
        if given is not None and not isinstance(given, Mapping):
            raise ConfigError(
                f"checkpoint={given!r} is not a valid value; valid values: a CheckpointConfig, its options"
            )
        return cls.from_dict(given or {})

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> CheckpointConfig:
        """Builds a config from plain values (JSON, YAML); durations in seconds. An unknown key lists the valid ones."""
        known = [field.name for field in fields(cls)]
        unknown = sorted(set(values) - set(known))
        if unknown:
            raise ConfigError(f"unknown option(s) {', '.join(unknown)}; valid options: {', '.join(known)}")
        given = dict(values)
        for name in ("every", "preemption_deadline", "stall_deadline"):
            value = given.get(name)
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                given[name] = timedelta(seconds=value)
        if isinstance(given.get("preemption_signals"), list):
            given["preemption_signals"] = tuple(given["preemption_signals"])
        return cls(**given)
