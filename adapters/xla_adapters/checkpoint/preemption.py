"""`Preemption`: handles the signal that announces the end of the process."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

from xla_adapters.checkpoint.config import CheckpointConfig


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
