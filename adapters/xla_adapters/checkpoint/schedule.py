"""`SaveSchedule`: when a checkpoint is due (after steps, after time, before a preemption)."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from enum import StrEnum

from xla_adapters.checkpoint.config import CheckpointConfig
from xla_adapters.checkpoint.group import Group, OneProcess
from xla_adapters.checkpoint.preemption import Preemption


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
