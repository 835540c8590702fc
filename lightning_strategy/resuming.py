"""Which checkpoint a fit goes on from, if it is told to look for the last one."""

from __future__ import annotations

import os
import sys
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer

from xla_adapters.checkpoint import CheckpointStore, CheckpointWarning
from xla_adapters.errors import CheckpointDamagedError

_FIT = Trainer.fit.__code__


def asks_for_newest() -> bool:
    """Whether a fit is under way whose user gave `ckpt_path="last"` (or "hpc", or nothing), and no path.

    Lightning resolves it before a strategy hears of it; what the user gave is on the stack (see `connector`).
    """
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _FIT:
            trainer, given = frame.f_locals["self"], frame.f_locals["ckpt_path"]
            return given in ("last", "hpc") or (given is None and not trainer._checkpoint_connector._user_managed)
        frame = frame.f_back  # type: ignore[assignment]
    return False


def load_newest(path: Any, load: Callable[[Any], dict[str, Any]]) -> tuple[str, dict[str, Any]]:
    """Loads a checkpoint, or if it is damaged the newest valid one beside it that a training can go on from.

    Args:
        path: what Lightning found.
        load: loads the checkpoint at a path.

    Returns: which one, and its contents.

    Raises:
        CheckpointDamagedError: there is none.
    """
    try:
        _check_whole(path)
        return os.fspath(path), load(path)
    except CheckpointDamagedError as error:
        damaged = error
    warnings.warn(f"{damaged}; the newest valid checkpoint beside it is looked for", CheckpointWarning, stacklevel=2)
    for checkpoint in CheckpointStore(Path(path).absolute().parent).each_valid():
        loaded = load(checkpoint.path)
        if "optimizer_states" in loaded:
            warnings.warn(f"the training goes on from {checkpoint.path}", CheckpointWarning, stacklevel=2)
            return checkpoint.path, loaded
    raise CheckpointDamagedError(f"{damaged}; and no other checkpoint beside it is valid") from damaged


def _check_whole(path: Any) -> None:
    """A file without a manifest may be Lightning's own, or what is left of ours."""
    if os.path.isfile(path) and not zipfile.is_zipfile(path):
        raise CheckpointDamagedError(f"{os.fspath(path)} is damaged: it was cut off, or is no checkpoint")
