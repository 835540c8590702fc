"""When a run saves beside its trainer's own schedule, and which of its settings are compared when it resumes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from xla_adapters.checkpoint import Checkpoint, CheckpointConfig, Preemption, SaveSchedule, differences
from xla_adapters.checkpoint import warn_of_differences as warn_of_lines
from xla_adapters.config import REMOVED_OPTIONS, XLAConfig
from xla_adapters.errors import UnsupportedOptionError
from xla_adapters.runtime import get_runtime
from xla_adapters.sharding import ShardingConfig

_log = logging.getLogger(__name__)


class ScheduledSaves:
    """Says when `CheckpointConfig` has a run saved, and saves before a signal ends the process.

    Args:
        config: when to save.
    """

    def __init__(self, config: CheckpointConfig) -> None:
        self._config = config
        # Signals and clocks of ranks differ.
        asks = config.save_on == "preemption" or config.every is not None
        self._ranks = get_runtime().device.ranks if asks else None
        self._ends = False
        self._preemption = Preemption(config, also=get_runtime().device.preemption_sync_point())
        self._schedule = SaveSchedule(config, preemption=self._preemption, group=self._ranks)

    def receiving_signals(self) -> AbstractContextManager[object]:
        """Around a training: signals are noted under `save_on="preemption"`."""
        return self._preemption if self._config.save_on == "preemption" else nullcontext()

    def are_due(self, step: int) -> bool:
        """Whether to save after this step. All ranks ask after each step."""
        if self._ranks is not None:
            self._ends = any(self._ranks.gather(self._preemption.requested))
        return self._schedule.due(step) is not None

    def saved(self, step: int) -> None:
        """A checkpoint of this step was saved, or is being saved in the background."""
        self._schedule.saved(step)

    @property
    def end_is_near(self) -> bool:
        """Whether a signal asked for the end of the training."""
        return self._preemption.requested if self._ranks is None else self._ends

    @property
    def exit_code(self) -> int:
        """With which the process is to end then."""
        return self._preemption.exit_code

    def can_still_save(self, step: int) -> bool:
        """Whether the training is to end, and there is time left for a save."""
        if self._ranks is not None and not self._ends:
            # The other ranks do not know of a signal yet.
            return False
        can_save = self._preemption.can_still_save(step)
        if self._ranks is None:
            return can_save
        # A rank that no signal has reached does not know how much time is left.
        return all(self._ranks.gather(can_save or not self._preemption.requested))

    def save_before_end(
        self, step: int, save: Callable[[], object] | None, finish_pending: Callable[[], object]
    ) -> None:
        """Saves for the last time.

        Args:
            step: the last one.
            save: saves; None if there is nothing new to save.
            finish_pending: waits for a save in the background.
        """
        if save is not None:
            if self.can_still_save(step):
                save()
            else:
                _log.warning("the time to save has passed: the training ends after step %d unsaved", step)
        finish_pending()
        _log.warning("the training ends after step %d, as a signal asked", step)


def refuse_background_shards(config: CheckpointConfig, shards: bool, where: str = "") -> None:
    """Raises if checkpoints are to be written shard by shard, and in the background.

    Args:
        config: the options.
        shards: whether they are written shard by shard.
        where: the beginning of the message.

    Raises:
        UnsupportedOptionError: both are asked for.
    """
    if config.asynchronous and shards:
        raise UnsupportedOptionError(
            f"{where}asynchronous=True with ShardingConfig(checkpoints='sharded'): parts come to the host one at a "
            "time, so that the state never lies there as a whole, and a copy of all would be the opposite. Leave one "
            "of them out"
        )


def settings_for_manifest(
    own: Mapping[str, Any], config: XLAConfig, sharding: ShardingConfig | None, *, rng_algorithm: str | None = None
) -> dict[str, Any]:
    """The settings that decide the losses of a run, as plain values for the manifests of its checkpoints.

    Args:
        own: those of the trainer.
        config: the XLA options.
        sharding: how the run is sharded.
        rng_algorithm: of the device; None if it is saved beside the random numbers.
    """
    options = config.of_numbers()
    del options["rng_algorithm"]
    if rng_algorithm is not None:
        options["rng_algorithm"] = rng_algorithm
    plan = None if sharding is None else {"scheme": sharding.scheme, "mesh_shape": sharding.mesh_shape}
    return {**own, "xla": options, "sharding": plan}


def warn_of_differences(
    checkpoint: Checkpoint, settings: Mapping[str, Any] | None, *, distributions: Sequence[str], devices: int
) -> None:
    """Warns with a diff if the run that wrote a checkpoint had other versions, settings or devices than this one.

    Args:
        checkpoint: with its manifest.
        settings: of this run; None are not compared.
        distributions: whose versions are compared, beside the core's own.
        devices: of this run.
    """
    ranks = get_runtime().device.ranks
    lines = differences(
        checkpoint.manifest,
        settings=settings,
        distributions=distributions,
        world={"processes": 1 if ranks is None else ranks.size, "devices": devices},
        ignore=[f"xla.{name}" for name in REMOVED_OPTIONS],
    )
    warn_of_lines(checkpoint, lines)
