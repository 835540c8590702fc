"""When to save: `CheckpointConfig` has the options, `Preemption` notes the signal, and `SaveSchedule` decides."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from datetime import timedelta
from enum import StrEnum
from types import FrameType, TracebackType
from typing import Any, Literal, get_args

from xla_adapters.checkpoint.group import Group, OneProcess
from xla_adapters.config import check_choice
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
        trust_files: load a checkpoint whose files differ from its manifest, with a warning: you have rewritten them
            (merged adapters, converted weights). Damage is not found either.

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
    trust_files: bool = False

    def __post_init__(self) -> None:
        for name in ("every_n_steps", "keep_last", "keep_every"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ConfigError(f"{name}={value!r} is not a valid value; valid values: None or an integer >= 1")
        for name in ("every", "preemption_deadline", "stall_deadline"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, timedelta) or value <= timedelta(0)):
                raise ConfigError(f"{name}={value!r} is not a valid value; valid values: None or a timedelta > 0")
        check_choice("save_on", self.save_on, (None, *get_args(SaveOn)))
        for name in ("asynchronous", "trust_files"):
            check_choice(name, getattr(self, name), (True, False))
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


class Preemption:
    """A context manager in which the signals of `preemption_signals` are recorded instead of ending the process.

    Further signals change nothing. A handler that was installed before (by the host framework) is called, too, and is
    restored at the exit. Once the checkpoint is written, the adapters raise `SystemExit(exit_code)`.

    Python handles signals in the main thread only; in other threads none is recorded.

    Args:
        config: `preemption_signals`, `preemption_deadline`, `preemption_exit_code`.
        also: another source of preemption notices, called with the step (the sync point of a TPU's coordinator, say);
            it must give all ranks the same answer.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        config: CheckpointConfig | None = None,
        *,
        also: Callable[[int], bool] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config if config is not None else CheckpointConfig()
        self._also = also
        self._clock = clock
        self._previous: dict[signal.Signals, Any] = {}
        self._signal: signal.Signals | None = None
        self._since: float | None = None

    @property
    def requested(self) -> bool:
        """Whether the end of the process was announced."""
        return self._since is not None

    @property
    def remaining(self) -> float | None:
        """Seconds until `preemption_deadline`; `None` without an announcement or a deadline."""
        if self._since is None or self._config.preemption_deadline is None:
            return None
        return self._config.preemption_deadline.total_seconds() - (self._clock() - self._since)

    def can_still_save(self, step: int) -> bool:
        """Whether the end of the process was announced, and there is time left for a save.

        Args:
            step: optimizer steps done.
        """
        if self._since is None and self._also is not None and self._also(step):
            self._since = self._clock()
        remaining = self.remaining
        return self.requested and (remaining is None or remaining > 0)

    @property
    def exit_code(self) -> int:
        """The exit status: `preemption_exit_code`, or 128 + the signal's number (143 for SIGTERM)."""
        if self._config.preemption_exit_code is not None:
            return self._config.preemption_exit_code
        return 128 + (self._signal or signal.SIGTERM)

    def __enter__(self) -> Preemption:
        if threading.current_thread() is threading.main_thread():
            for number in self._config.signals():
                self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, previous in self._previous.items():
            # A handler that was installed later stays.
            if signal.getsignal(number) == self._note:
                signal.signal(number, previous if previous is not None else signal.SIG_DFL)
        self._previous.clear()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._since is None:
            self._signal, self._since = signal.Signals(number), self._clock()
        previous = self._previous.get(signal.Signals(number))
        if callable(previous) and previous is not signal.default_int_handler:
            previous(number, frame)


class SaveReason(StrEnum):
    """Why a checkpoint is due. If there are several reasons, the first in this order counts."""

    PREEMPTION = "preemption"
    STEPS = "steps"
    TIME = "time"


class SaveSchedule:
    """Decides after each optimizer step whether to save. All ranks must ask after each step; all get the same answer.

    Args:
        config: `every_n_steps`, `every`, `save_on`.
        preemption: tells whether the end of the process was announced.
        group: the processes that save together.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        *,
        preemption: Preemption | None = None,
        group: Group | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._preemption = preemption
        self._group: Group = group if group is not None else OneProcess()
        self._clock = clock
        self._last_save = clock()
        self._last_step: int | None = None

    def due(self, step: int) -> SaveReason | None:
        """Why a checkpoint is due at this step; `None` if it is not, or if this step was saved.

        Clocks and signals differ between ranks. If one rank has a reason, all ranks save.

        Args:
            step: optimizer steps done.
        """
        reasons = [reason for reason in self._group.gather(self._own(step)) if reason is not None]
        order = list(SaveReason)
        return min(reasons, key=order.index) if reasons else None

    def _own(self, step: int) -> SaveReason | None:
        if self._last_step == step:
            return None
        config, signalled = self._config, self._preemption
        if config.save_on == "preemption" and signalled is not None and signalled.can_still_save(step):
            return SaveReason.PREEMPTION
        if config.every_n_steps is not None and step > 0 and step % config.every_n_steps == 0:
            return SaveReason.STEPS
        if config.every is not None and timedelta(seconds=self._clock() - self._last_save) >= config.every:
            return SaveReason.TIME
        return None

    def saved(self, step: int) -> None:
        """Must be called when a save of this step starts, for whatever reason."""
        self._last_save = self._clock()
        self._last_step = step
