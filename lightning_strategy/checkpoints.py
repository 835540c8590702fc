"""Checkpoints of the XLA strategies: host tensors in Lightning's own format, which any Trainer reads."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning_utilities.core.apply_func import apply_to_collection

from xla_adapters import get_backend
from xla_adapters.checkpoint import CheckpointStore
from xla_adapters.checkpoint.sealing import problems, read_manifest
from xla_adapters.checkpoint.storage import LocalStorage
from xla_adapters.errors import CheckpointDamagedError
from xla_adapters.nested_values import identity

RANDOM_STATE = "xla_adapters"


class XLAEagerCheckpointIO(TorchCheckpointIO):
    """Writes what it is given with `torch.save`; the strategy has brought it to the host before.

    A local file appears under its name whole, or not at all, with a manifest as the comment of its zip archive; when
    it is loaded it is compared with that. Remote ones are written as Lightning does.

    Lightning's own for XLA goes through `xm.save` machinery of torch_xla; nothing here does.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """As `TorchCheckpointIO.save_checkpoint`.

        Raises:
            CheckpointWriteError: the storage refused; what was there before still is.
        """
        local = _local(path)
        # Names that begin like this are the store's own, which nothing resumes from.
        if local is None or storage_options is not None or local.name.startswith((".", "_")):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        store = CheckpointStore(local.parent, distributions=("lightning",))
        step = int(checkpoint.get("global_step", 0))
        store.save(step, lambda file: torch.save(checkpoint, file), name=local.name, one_file=True)

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """As `TorchCheckpointIO.load_checkpoint`.

        Raises:
            CheckpointDamagedError: the file has a manifest, and is not what was written.
        """
        local, storage = _local(path), LocalStorage()
        if local is not None and local.is_file():
            real = os.path.realpath(local)
            manifest = read_manifest(storage, real)
            wrong = [] if manifest is None else problems(storage, real, manifest)
            if wrong:
                raise CheckpointDamagedError(f"{path} is damaged: {'; '.join(wrong)}")
        loaded: dict[str, Any] = super().load_checkpoint(path, *args, **kwargs)
        return loaded


def _local(path: Any) -> Path | None:
    return None if "://" in os.fspath(path) else Path(path).absolute()


def on_host(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """A copy of a checkpoint with all tensors on the host, in one transfer.

    Tensors that were one on the device (tied weights) are one on the host. Under donation the device's
    buffers are reused by the next step, so a writer that works in the background needs this copy too.
    """
    backend = get_backend()
    found: dict[tuple[object, ...], torch.Tensor] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if backend.is_backend_tensor(tensor):
            found.setdefault(identity(tensor), tensor)
        return tensor

    apply_to_collection(checkpoint, torch.Tensor, note)
    copies = dict(zip(found, backend.to_host(list(found.values())), strict=True))

    def replace(tensor: torch.Tensor) -> torch.Tensor:
        return copies.get(identity(tensor), tensor) if backend.is_backend_tensor(tensor) else tensor

    converted: dict[str, Any] = apply_to_collection(checkpoint, torch.Tensor, replace)
    for name, value in checkpoint.items():
        # The versions of modules, an attribute that the copy of a dict loses.
        if hasattr(value, "_metadata"):
            converted[name] = copy.copy(value)
            converted[name].update({key: replace(item) for key, item in value.items()})
    return converted
