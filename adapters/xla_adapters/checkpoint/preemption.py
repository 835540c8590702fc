"""The signal that announces the end of the process, and what is done before it comes."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

from xla_adapters.checkpoint.config import CheckpointConfig


class Preemption:
    """While it is entered, the signals of `preemption_signals` are noted instead of ending the process.

    A second signal is noted, too, and changes nothing. A handler that was there before (the host framework's own)
    is called as well, and is put back at the end. The process ends with the exit status of `exit_code`, which the
    adapters raise as `SystemExit` once the checkpoint is written.

    Signals reach the main thread only; entered elsewhere, none is noted.

    Args:
        config: `preemption_signals`, `preemption_deadline`, `preemption_exit_code`.
        also: another source, asked with the step (the sync point of a TPU's coordinator, say); all ranks must get
            the same answer from it.
        clock: in seconds, of any beginning.
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
        """Whether the end was announced."""
        return self._since is not None

    @property
    def remaining(self) -> float | None:
        """Seconds until `preemption_deadline`; `None` without an announcement or a deadline."""
        if self._since is None or self._config.preemption_deadline is None:
            return None
        return self._config.preemption_deadline.total_seconds() - (self._clock() - self._since)

    def can_still_save(self, step: int) -> bool:
        """Whether the end was announced, and there is time left for a save.

        Args:
            step: optimizer steps done.
        """
        if self._since is None and self._also is not None and self._also(step):
            self._since = self._clock()
        remaining = self.remaining
        return self.requested and (remaining is None or remaining > 0)

    @property
    def exit_code(self) -> int:
        """What the process should exit with: what a shell reports of one that the signal ended (143 for SIGTERM)."""
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
            # Whoever came later and stands before this one keeps the place.
            if signal.getsignal(number) == self._note:
                signal.signal(number, previous if previous is not None else signal.SIG_DFL)
        self._previous.clear()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._since is None:
            self._signal, self._since = signal.Signals(number), self._clock()
        previous = self._previous.get(signal.Signals(number))
        if callable(previous) and previous is not signal.default_int_handler:
            previous(number, frame)
