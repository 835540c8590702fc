"""Checkpoints of the XLA strategies: host tensors in Lightning's own format, which any Trainer reads."""

from __future__ import annotations

import functools
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io import CheckpointIO, TorchCheckpointIO
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO

from lightning_strategy.checkpoints.host_copy import HostCopy
from xla_adapters.checkpoint import (
    AsyncSaver,
    CheckpointConfig,
    CheckpointStore,
    Watchdog,
    naming_failed_writes,
    remove_checkpoint,
    snapshot,
    verify,
)
from xla_adapters.errors import CheckpointWarning

# The key in a checkpoint under which an exact resume finds random numbers, data position and gradients.
EXACT_STATE = "xla_adapters"
# The distributions whose versions are in a manifest, beside the core's own.
DISTRIBUTIONS = ("lightning",)


class XLAEagerCheckpointIO(TorchCheckpointIO):
    """Writes checkpoints whose tensors are on the host with `torch.save`, and reads them.

    A local file appears under its name only when it is complete. Its manifest is the comment of its zip archive; a
    file that is loaded is compared with its manifest. Remote files are written as by `TorchCheckpointIO`.

    Lightning's `XLACheckpointIO` saves through torch_xla's `xm.save`; this class does not.

    Args:
        config: of which `asynchronous` and `stall_deadline` are used.

    Attributes:
        settings, devices: of the run that saves, for the manifest.
    """

    def __init__(self, config: CheckpointConfig | None = None) -> None:
        self.config = config if config is not None else CheckpointConfig()
        self.settings: Mapping[str, Any] = {}
        self.devices = 1
        self._saver: AsyncSaver | None = None
        self._to_remove: list[str] = []

    def __getstate__(self) -> dict[str, Any]:
        """A copy has no save in the background, and removes nothing that this object is to remove."""
        return {**vars(self), "_saver": None, "_to_remove": []}

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """As `TorchCheckpointIO.save_checkpoint`; in the background under `asynchronous`.

        Raises:
            CheckpointWriteError: this write failed (or that of the save before, in the background); a checkpoint that
                was to be replaced is unchanged.
        """
        local = _local(path)
        # A store uses names that begin like this for itself, and never loads them.
        if local is None or storage_options is not None or local.name.startswith((".", "_")):
            self.settle()
            name, folder = os.path.basename(os.fspath(path)), os.path.dirname(os.fspath(path))
            with naming_failed_writes(f"checkpoint {name!r}", folder):
                super().save_checkpoint(checkpoint, path, storage_options=storage_options)
            return
        store, step = self._store(local.parent), int(checkpoint.get("global_step", 0))
        self.settle()
        if not self.config.asynchronous:
            write = functools.partial(_write, checkpoint)
            with _allowing_no_file():
                store.save(step, write, name=local.name, one_file=True, settings=self.settings)
            return
        if self._saver is None:
            self._saver = AsyncSaver(store)
        self._saver.store = store
        self._saver.save(step, checkpoint, _write, take=_copied, name=local.name, one_file=True, settings=self.settings)

    def save_folder(self, step: int, write: Callable[[Path], None], folder: Path) -> None:
        """Saves a checkpoint of several files; the folder appears only when it is complete.

        Args:
            step: the global step, for the manifest.
            write: writes the files to the folder that it is given.
            folder: where the checkpoint is to be.

        Raises:
            CheckpointWriteError: the write failed; a folder that was to be replaced is unchanged.
        """
        self.settle()
        self._store(folder.parent).save(step, write, name=folder.name, settings=self.settings)

    def remove_checkpoint(self, path: Any) -> None:
        """As `TorchCheckpointIO.remove_checkpoint`; nobody ever sees a part of a checkpoint.

        While another checkpoint is being written this one stays: that write may fail, and this one be the last.
        """
        if self._saver is not None and self._saver.in_flight:
            self._to_remove.append(os.fspath(path))
            return
        local = _local(path)
        if local is None or local.is_symlink() or local.name.startswith((".", "_")) or not local.exists():
            super().remove_checkpoint(path)
            return
        store = self._store(local.parent)
        with store.alone(f"checkpoint {local.name!r} was not removed from {store.root}"):
            remove_checkpoint(store.storage, store.root, local.name)

    def settle(self) -> None:
        """Waits for the save in the background, and then removes the checkpoints whose removal was put off.

        Raises:
            CheckpointWriteError, or what the writer raised: the save failed.
        """
        to_remove, self._to_remove = self._to_remove, []
        if self._saver is not None:
            with _allowing_no_file():
                self._saver.wait()
        for path in to_remove:
            self.remove_checkpoint(path)

    def tidy(self) -> None:
        """Removes the checkpoints whose removal was put off, if nothing is being written any more."""
        if self._to_remove and self._saver is not None and not self._saver.in_flight:
            self.settle()

    def teardown(self) -> None:
        """As `settle`. If an error is being handled already, a failure of the save is printed and not raised."""
        error = sys.exc_info()[1]
        if self._saver is not None and error is not None and not isinstance(error, SystemExit):
            self._saver.__exit__(type(error), error, None)
        self.settle()

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """As `TorchCheckpointIO.load_checkpoint`.

        Raises:
            CheckpointDamagedError: the file differs from its manifest.
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


def with_writer(io: CheckpointIO) -> CheckpointIO:
    """The same; the innermost of nested wrappers that wraps nothing gets an `XLAEagerCheckpointIO`."""
    inner: Any = io
    while isinstance(inner, _WrappingCheckpointIO):
        inner = inner.checkpoint_io
    if inner is None:
        # Lightning's setter passes it on, and notes in each wrapper that there is one.
        io.checkpoint_io = XLAEagerCheckpointIO()  # type: ignore[attr-defined]
    return io


class _NoFileError(Exception):
    """`torch.save` has returned without writing a file."""


def _write(checkpoint: dict[str, Any], file: Path) -> None:
    torch.save(checkpoint, file)
    if not file.exists():
        raise _NoFileError(f"the checkpoint {file.name!r} was not saved: torch.save was replaced, and wrote no file")


@contextmanager
def _allowing_no_file() -> Iterator[None]:
    """Warns if `torch.save` wrote no file: somebody has replaced it (by a mock, say) so that nothing is written."""
    try:
        yield
    except _NoFileError as error:
        warnings.warn(str(error), CheckpointWarning, stacklevel=2)


def _copied(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """A copy that the training does not change while it is written."""
    return checkpoint.copied if isinstance(checkpoint, HostCopy) else snapshot(checkpoint)


def _local(path: Any) -> Path | None:
    return None if "://" in os.fspath(path) else Path(path).absolute()
