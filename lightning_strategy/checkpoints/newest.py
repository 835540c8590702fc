"""Which checkpoint a fit resumes from if the user asked for the last one."""

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
    """Whether a fit is under way to which the user gave `ckpt_path="last"` (or "hpc", or nothing), and no path.

    Lightning gives the strategy only the path that it found. The user's argument is read from the frame of
    `Trainer.fit` (see `connector.flags`).
    """
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _FIT:
            trainer, given = frame.f_locals["self"], frame.f_locals["ckpt_path"]
            return given in ("last", "hpc") or (given is None and not trainer._checkpoint_connector._user_managed)
        frame = frame.f_back  # type: ignore[assignment]
    return False


def load_newest(path: Any, load: Callable[[Any], dict[str, Any]]) -> tuple[str, dict[str, Any]]:
    """Loads a checkpoint; if it is damaged, the newest valid one beside it that has optimizer states.

    Args:
        path: what Lightning found.
        load: loads the checkpoint at a path.

    Returns:
        The path of the checkpoint that was loaded, and its contents.

    Raises:
        CheckpointDamagedError: none is valid.
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
    """Raises on a file that was cut off; without a manifest, which stands at its end, it could be Lightning's own."""
    if os.path.isfile(path) and not zipfile.is_zipfile(path):
        raise CheckpointDamagedError(f"{os.fspath(path)} is damaged: it was cut off, or is no checkpoint")
