"""Decides which old checkpoints are deleted."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from xla_adapters.checkpoint.manifest import Checkpoint


def superfluous(
    checkpoints: Sequence[Checkpoint],
    *,
    keep_last: int | None,
    keep_every: int | None = None,
    protected: Collection[str] = (),
) -> list[Checkpoint]:
    """The checkpoints that can be deleted.

    Args:
        checkpoints: oldest first; the last one must be valid, and is always kept.
        keep_last: how many of the newest to keep; `None` keeps all.
        keep_every: keep those whose step is a multiple of this.
        protected: names to keep.
    """
    if keep_last is None:
        return []
    older = checkpoints[: -max(1, keep_last)]
    return [
        checkpoint
        for checkpoint in older
        if checkpoint.name not in protected and (keep_every is None or checkpoint.step % keep_every != 0)
    ]
