"""One file out of a checkpoint whose tensors lie in pieces (torch.distributed.checkpoint)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from xla_adapters.errors import CheckpointDamagedError, CheckpointNotFoundError, ConfigError

_SUFFIXES = (".safetensors", ".pt", ".pth", ".bin")


def sharded_folders(checkpoint: Path) -> list[Path]:
    """The folders within a checkpoint (itself too) that torch.distributed.checkpoint wrote."""
    return sorted(path.parent for path in checkpoint.rglob(".metadata"))


def consolidate(checkpoint: Path, target: Path) -> list[str]:
    """Writes the whole tensors of a sharded checkpoint into one file. They must fit into this machine's memory.

    Args:
        checkpoint: a folder with exactly one sharded state in it.
        target: a file of safetensors (tensors only, by their dotted names), or of `torch.save` (`.pt`, `.pth`,
            `.bin`; everything, nested as it was).

    Returns: the names of what the target has no room for.

    Raises:
        ConfigError: the target's name ends otherwise.
        CheckpointNotFoundError: there is no sharded state, or more than one.
        CheckpointDamagedError: torch cannot read it.
    """
    if target.suffix not in _SUFFIXES:
        raise ConfigError(f"{target}: the name of the file must end in one of {', '.join(_SUFFIXES)}")
    folders = sharded_folders(checkpoint)
    if len(folders) != 1:
        listed = ", ".join(map(str, folders)) or "none"
        raise CheckpointNotFoundError(f"{checkpoint} must hold one sharded state (.metadata); it holds: {listed}")
    state: dict[str, Any] = {}
    try:
        _load_state_dict(
            state, storage_reader=FileSystemReader(folders[0]), planner=_EmptyStateDictLoadPlanner(), no_dist=True
        )
    except (CheckpointException, OSError, RuntimeError, ValueError) as error:
        raise CheckpointDamagedError(f"{folders[0]} cannot be read: {error}") from error
    if target.suffix != ".safetensors":
        torch.save(state, target)
        return []
    flat = dict(_flat(state))
    tensors = {name: value.contiguous() for name, value in flat.items() if isinstance(value, torch.Tensor)}
    save_file(tensors, target)
    return sorted(set(flat) - set(tensors))


def _flat(state: Mapping[str, Any], below: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in state.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{below}{name}.")
        else:
            yield f"{below}{name}", value
