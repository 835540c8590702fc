"""When to save: after steps, after time, before the end."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from enum import Enum

from xla_adapters.checkpoint.config import CheckpointConfig
from xla_adapters.checkpoint.group import Group, OneProcess
from xla_adapters.checkpoint.preemption import Preemption


class SaveReason(str, Enum):
    """Why a checkpoint is due; of several reasons the first in this list."""

    PREEMPTION = "preemption"
    STEPS = "steps"
    TIME = "time"


class SaveSchedule:
    """Says after each optimizer step whether to save. All ranks ask after each step, and get one answer.

    Args:
        config: `every_n_steps`, `every`, `save_on`.
        preemption: what tells that the process will end.
        group: the processes that save together.
        clock: in seconds, of any beginning.
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
        """Why a checkpoint of this step is due now; `None` if it is not, or was saved already.

        Each rank has a clock and signals of its own: what is due for one of them is due for all.

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
        """Tells that a save of this step has begun, for whatever reason."""
        self._last_save = self._clock()
        self._last_step = step
