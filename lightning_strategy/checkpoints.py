"""Checkpoints of the XLA strategies: host tensors in Lightning's own format, which any Trainer reads."""

from __future__ import annotations

import copy
import functools
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning_utilities.core.apply_func import apply_to_collection

from xla_adapters import get_backend
from xla_adapters.checkpoint import AsyncSaver, CheckpointConfig, CheckpointStore, Watchdog, snapshot, verify
from xla_adapters.checkpoint.commit import remove_checkpoint
from xla_adapters.nested_values import identity

RANDOM_STATE = "xla_adapters"
# Whose versions a manifest names.
DISTRIBUTIONS = ("lightning",)


class XLAEagerCheckpointIO(TorchCheckpointIO):
    """Writes what it is given with `torch.save`; the strategy has brought it to the host before.

    A local file appears under its name whole, or not at all, with a manifest as the comment of its zip archive; when
    it is loaded it is compared with that. Remote ones are written as Lightning does.

    Lightning's own for XLA goes through `xm.save` machinery of torch_xla; nothing here does.

    Args:
        config: `asynchronous` and `stall_deadline` of it are of use here.

    Attributes:
        settings, devices: of the run that saves, for the manifest.
    """

    def __init__(self, config: CheckpointConfig | None = None) -> None:
        self.config = config if config is not None else CheckpointConfig()
        self.settings: Mapping[str, Any] = {}
        self.devices = 1
        self._saver: AsyncSaver | None = None
        self._superfluous: list[str] = []

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """As `TorchCheckpointIO.save_checkpoint`; in the background if it is asked for.

        Raises:
            CheckpointWriteError: the storage refused (or did at the save before, which was in the background); what
                was there before still is.
        """
        local = _local(path)
        # Names that begin like this are the store's own, which nothing resumes from.
        if local is None or storage_options is not None or local.name.startswith((".", "_")):
            self.settle()
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        store, step = self._store(local.parent), int(checkpoint.get("global_step", 0))
        self.settle()
        if not self.config.asynchronous:
            write = functools.partial(_write, checkpoint)
            store.save(step, write, name=local.name, one_file=True, settings=self.settings)
            return
        if self._saver is None:
            self._saver = AsyncSaver(store)
        self._saver.store = store
        self._saver.save(step, checkpoint, _write, take=_own, name=local.name, one_file=True, settings=self.settings)

    def save_folder(self, step: int, write: Callable[[Path], None], folder: Path) -> None:
        """Has a checkpoint of several files written; it appears whole, or not at all.

        Raises:
            CheckpointWriteError: the storage refused; what was there before still is.
        """
        self.settle()
        self._store(folder.parent).save(step, write, name=folder.name, settings=self.settings)

    def remove_checkpoint(self, path: Any) -> None:
        """As `TorchCheckpointIO.remove_checkpoint`, such that half a checkpoint is never seen.

        While another one is being written it stays: that may fail, and this one be the last.
        """
        if self._saver is not None and self._saver.in_flight:
            self._superfluous.append(os.fspath(path))
            return
        local = _local(path)
        if local is None or local.is_symlink() or local.name.startswith((".", "_")) or not local.exists():
            super().remove_checkpoint(path)
            return
        store = self._store(local.parent)
        with store.alone(f"checkpoint {local.name!r} was not removed from {store.root}"):
            remove_checkpoint(store.storage, store.root, local.name)

    def settle(self) -> None:
        """Waits for the save in flight, and removes what it made superfluous.

        Raises:
            CheckpointWriteError, or what the writer raised: the save failed.
        """
        superfluous, self._superfluous = self._superfluous, []
        if self._saver is not None:
            self._saver.wait()
        for path in superfluous:
            self.remove_checkpoint(path)

    def tidy(self) -> None:
        """Removes what is superfluous, if nothing is being written any more."""
        if self._superfluous and self._saver is not None and not self._saver.in_flight:
            self.settle()

    def teardown(self) -> None:
        """Waits for the save in flight; as `settle`. Of an error that is being handled, it prints what it finds."""
        error = sys.exc_info()[1]
        if self._saver is not None and error is not None and not isinstance(error, SystemExit):
            self._saver.__exit__(type(error), error, None)
        self.settle()

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """As `TorchCheckpointIO.load_checkpoint`.

        Raises:
            CheckpointDamagedError: the file has a manifest, and is not what was written.
        """
        self.settle()
        local = _local(path)
        if local is not None and local.is_file():
            verify(local)
        loaded: dict[str, Any] = super().load_checkpoint(path, *args, **kwargs)
        return loaded

    def _store(self, folder: Path) -> CheckpointStore:
        return CheckpointStore(
            folder,
            distributions=DISTRIBUTIONS,
            devices=self.devices,
            watchdog=Watchdog(self.config.stall_deadline),
        )


def _write(checkpoint: dict[str, Any], file: Path) -> None:
    torch.save(checkpoint, file)


def _own(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint that nobody else changes."""
    return checkpoint.taken if isinstance(checkpoint, Taken) else snapshot(checkpoint)


class Taken(dict[str, Any]):
    """A checkpoint that was copied already.

    Args:
        taken: the copy.
    """

    def __init__(self, taken: dict[str, Any]) -> None:
        super().__init__(taken)
        self.taken = taken


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
