"""Writes a sharded checkpoint (torch.distributed.checkpoint) as a single file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from xla_adapters.errors import CheckpointDamagedError, CheckpointNotFoundError


def sharded_folders(checkpoint: Path) -> list[Path]:
    """The folders in a checkpoint (or itself) that torch.distributed.checkpoint wrote."""
    return sorted(path.parent for path in checkpoint.rglob(".metadata"))


def one_sharded_folder(checkpoint: Path) -> Path:
    """The only folder in a checkpoint that torch.distributed.checkpoint wrote.

    Raises:
        CheckpointNotFoundError: there is none, or more than one.
    """
    folders = sharded_folders(checkpoint)
    if len(folders) != 1:
        listed = ", ".join(map(str, folders)) or "none"
        raise CheckpointNotFoundError(f"{checkpoint} must hold one sharded state (.metadata); it holds: {listed}")
    return folders[0]


def to_one_file(checkpoint: Path, target: Path) -> None:
    """Writes the whole nested state of a sharded checkpoint with `torch.save`; it must fit into memory.

    For weights alone, one tensor at a time, see `xla_adapters.sharding.state.consolidate`.

    Args:
        checkpoint: its folder.
        target: the file to write.

    Raises:
        CheckpointNotFoundError: there is no sharded state, or more than one.
        CheckpointDamagedError: torch cannot read it.
    """
    folder = one_sharded_folder(checkpoint)
    state: dict[str, Any] = {}
    try:
        _load_state_dict(
            state, storage_reader=FileSystemReader(folder), planner=_EmptyStateDictLoadPlanner(), no_dist=True
        )
    except (CheckpointException, OSError, RuntimeError, ValueError) as error:
        raise CheckpointDamagedError(f"{folder} cannot be read: {error}") from error
    torch.save(state, target)
