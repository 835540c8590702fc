"""Checks of the checkpoint options against each other and the training arguments."""

from __future__ import annotations

import warnings
from typing import Any

from transformers.trainer_jit_checkpoint import JITCheckpointCallback

from xla_adapters.checkpoint import CheckpointConfig, CheckpointWarning
from xla_adapters.errors import ConfigError, UnsupportedOptionError


def check_checkpoint_options(
    config: CheckpointConfig, *, safe: bool, processes: int, in_parts: bool, limit: Any
) -> None:
    """Raises if an option cannot take effect. Warns if the default of `safe_checkpoints` has none.

    Args:
        config: how checkpoints are saved.
        safe: `safe_checkpoints`.
        processes: how many train together.
        in_parts: whether checkpoints are written shard by shard.
        limit: `save_total_limit`.

    Raises:
        ConfigError: two of them contradict each other.
        UnsupportedOptionError: this run cannot do what one of them asks for.
    """
    needs_store = [
        f"{name}={getattr(config, name)!r}"
        for name in ("asynchronous", "keep_last")
        if getattr(config, name) not in (None, False)
    ]
    if needs_store and not safe:
        raise ConfigError(f"{' and '.join(needs_store)}: only with safe_checkpoints=True")
    if config.keep_last is not None and limit is not None:
        raise ConfigError(
            f"keep_last={config.keep_last} and save_total_limit={limit} say the same in two ways: give one of them"
        )
    if config.asynchronous and in_parts:
        raise UnsupportedOptionError(
            "asynchronous=True with ShardingConfig(checkpoints='sharded'): parts come to the host one at a time, so "
            "that the state never lies there as a whole, and a copy of all would be the opposite. Leave one of them out"
        )
    if processes > 1 and config != CheckpointConfig():
        raise UnsupportedOptionError(
            f"checkpoint={config!r}: {processes} processes train together, each of which would decide and write for "
            "itself; leave the option out"
        )
    if processes > 1 and safe:
        warnings.warn(
            f"safe_checkpoints has no effect: {processes} processes train together, and transformers has each of them "
            "write files of its own. Checkpoints are written, and loaded unchecked, as transformers does it",
            CheckpointWarning,
            stacklevel=2,
        )


def hold_jit_checkpoint(callbacks: list[Any]) -> None:
    """Makes the callback of `enable_jit_checkpoint` save only after the step. Inside it there are no values yet."""
    for callback in callbacks:
        if isinstance(callback, JITCheckpointCallback):
            callback.on_pre_optimizer_step = _nothing  # type: ignore[method-assign]


def _nothing(*args: Any, **kwargs: Any) -> None: ...
