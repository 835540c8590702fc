"""Checkpoints in Lightning's formats: when they are written, how, and which one a fit resumes from."""

from __future__ import annotations

import functools
import os
import sys
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io import CheckpointIO, TorchCheckpointIO
from lightning.fabric.utilities.cloud_io import _load, get_filesystem
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.optim import Optimizer

from lightning_strategy.sharding import HostCopy, ModuleSharding
from xla_adapters import XLAConfig, get_runtime
from xla_adapters.checkpoint import (
    AsyncSaver,
    Checkpoint,
    CheckpointConfig,
    CheckpointStore,
    LocalStorage,
    Watchdog,
    naming_failed_writes,
    read_manifest,
    remove_checkpoint,
    snapshot,
    verify,
)
from xla_adapters.errors import CheckpointDamagedError, CheckpointWarning, UnsupportedOptionError
from xla_adapters.loop.checkpoints import (
    ScheduledSaves,
    refuse_background_shards,
    settings_for_manifest,
    warn_of_differences,
)
from xla_adapters.utils.unpickling import only_values

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
        config: of which `asynchronous`, `stall_deadline` and `trust_files` are used.

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
            self.finish_pending()
            name, folder = os.path.basename(os.fspath(path)), os.path.dirname(os.fspath(path))
            with naming_failed_writes(f"checkpoint {name!r}", folder):
                super().save_checkpoint(checkpoint, path, storage_options=storage_options)
            return
        store, step = self._store(local.parent), int(checkpoint.get("global_step", 0))
        self.finish_pending()
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
        self.finish_pending()
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

    def finish_pending(self) -> None:
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
            self.finish_pending()

    def teardown(self) -> None:
        """As `finish_pending`. If an error is being handled already, a failed save is printed and not raised."""
        error = sys.exc_info()[1]
        if self._saver is not None and error is not None and not isinstance(error, SystemExit):
            self._saver.__exit__(type(error), error, None)
        self.finish_pending()

    def load_checkpoint(self, path: Any, map_location: Any = "cpu", weights_only: bool | None = None) -> dict[str, Any]:
        """As `TorchCheckpointIO.load_checkpoint`.

        Raises:
            CheckpointDamagedError: the file differs from its manifest.
            CheckpointUnsafeError: it names code, and the user did not say `weights_only=False`.
        """
        self.finish_pending()
        local = _local(path)
        if local is not None and local.is_file():
            self.verify(local)
        if weights_only is None and local is None:
            # Lightning would read anything that comes from the web.
            weights_only = True
        if not get_filesystem(path).exists(path):
            raise FileNotFoundError(f"Checkpoint file not found: {path}")
        with only_values(path):
            # As the parent class of Lightning 2.6. That of 2.5 does not know `weights_only`, and reads anything.
            loaded: dict[str, Any] = _load(path, map_location, weights_only=weights_only)
        return loaded

    def verify(self, path: Any) -> None:
        """Compares a checkpoint with its manifest; under `trust_files` differing files are warned of.

        Raises:
            CheckpointDamagedError: it differs.
        """
        verify(path, trust_files=self.config.trust_files)

    def _store(self, folder: Path) -> CheckpointStore:
        return CheckpointStore(
            folder,
            distributions=DISTRIBUTIONS,
            devices=self.devices,
            watchdog=Watchdog(self.config.stall_deadline),
            trust_files=self.config.trust_files,
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


def load_newest(path: Any, load: Callable[[Any], dict[str, Any]]) -> tuple[Any, dict[str, Any]]:
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
        return path, load(path)
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


# Attributes of the Trainer. The length of the training is not compared: a resumed run is often a longer one.
_TRAINER = (
    "accumulate_grad_batches",
    "gradient_clip_algorithm",
    "gradient_clip_val",
    "limit_train_batches",
    "overfit_batches",
    "precision",
    "reload_dataloaders_every_n_epochs",
)


def settings_of(trainer: Trainer, config: XLAConfig, sharding: ModuleSharding | None) -> dict[str, Any]:
    """The settings of a run, as plain values for a manifest.

    Args:
        trainer: of the run; its optimizers exist.
        config: the XLA options.
        sharding: of the strategy, if it shards.
    """
    loop: Any = trainer.fit_loop
    values = {name: getattr(trainer if hasattr(trainer, name) else loop, name) for name in _TRAINER}
    optimizers = {str(index): _described(optimizer) for index, optimizer in enumerate(trainer.optimizers)}
    own = {"trainer": values, "optimizers": optimizers}
    return settings_for_manifest(own, config, None if sharding is None else sharding.config)


def _described(optimizer: Optimizer) -> dict[str, Any]:
    # A learning rate may be a tensor on the device, and reading it would cost a transfer.
    plain = {name: value for name, value in optimizer.defaults.items() if not isinstance(value, torch.Tensor)}
    return {"class": type(optimizer).__name__, **plain}


def devices_of(sharding: ModuleSharding | None) -> int:
    """How many devices a run uses."""
    return get_runtime().device.count() if sharding is not None else 1


def show_differences(path: Any, settings: Mapping[str, Any] | None, sharding: ModuleSharding | None) -> None:
    """Warns with a diff if the run that wrote a checkpoint had other versions, settings or devices than this one.

    Args:
        path: of the checkpoint; nothing is compared if it is remote, or has no manifest.
        settings: of this run; not compared if None, or if the manifest has none.
        sharding: of this run.
    """
    if "://" in os.fspath(path):
        return
    real = os.path.realpath(path)
    manifest = read_manifest(LocalStorage(), real)
    if manifest is None:
        return
    compared = settings if manifest.settings else None
    checkpoint = Checkpoint(path=real, manifest=manifest)
    warn_of_differences(checkpoint, compared, distributions=DISTRIBUTIONS, devices=devices_of(sharding))


# `ckpt_path="last"` looks for names that begin with "last".
NAME = "last-xla_adapters.ckpt"


class SavingCallback(Callback):
    """Saves between steps, under one name, in the folder of the first `ModelCheckpoint`.

    It runs after all other callbacks, so that what it saves is what they see.

    Args:
        config: when to save.
    """

    def __init__(self, config: CheckpointConfig) -> None:
        self._saves = ScheduledSaves(config)
        self._lasting = ExitStack()
        # No step and no evaluation was done since the last save.
        self._is_saved = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begins to note signals, beside Lightning's own handler."""
        self._lasting.enter_context(self._saves.receiving_signals())

    def on_train_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        """Saves if it is due; after a signal saves and ends the process."""
        self._is_saved = False
        _tidy(trainer)
        if trainer.fit_loop._should_accumulate():
            return
        if self._saves.are_due(trainer.global_step):
            self._save(trainer)
        self._end_after_signal(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """After a signal during an evaluation saves and ends the process."""
        if trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking:
            self._is_saved = False
            self._end_after_signal(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """As `on_validation_end`."""
        self._end_after_signal(trainer)

    def _end_after_signal(self, trainer: Trainer) -> None:
        if self._saves.end_is_near:
            self._save_before_end(trainer)
            raise SystemExit(self._saves.exit_code)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Saves where Lightning's own handler ends the run: the signal came between two steps."""
        if isinstance(exception, SIGTERMException) and self._saves.end_is_near:
            self._save_before_end(trainer)
            exception.code = self._saves.exit_code

    def _save_before_end(self, trainer: Trainer) -> None:
        io = trainer.strategy.checkpoint_io
        finish_pending = io.finish_pending if isinstance(io, XLAEagerCheckpointIO) else tuple
        save = None if self._is_saved else functools.partial(self._save, trainer)
        self._saves.save_before_end(trainer.global_step, save, finish_pending)

    def _save(self, trainer: Trainer) -> None:
        self._saves.saved(trainer.global_step)
        trainer.save_checkpoint(folder_of(trainer) / NAME)
        self._is_saved = True

    def close(self) -> None:
        """Restores the signal handlers."""
        self._lasting.close()


def folder_of(trainer: Trainer) -> Path:
    """The folder of a run's checkpoints."""
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint) and callback.dirpath is not None:
            return Path(callback.dirpath)
    return Path(trainer.default_root_dir) / "checkpoints"


def check_options(strategy: str, config: CheckpointConfig, *, sharded: bool) -> None:
    """Raises on options that cannot take effect.

    Args:
        strategy: its name, for messages.
        config: the options.
        sharded: whether checkpoints are sharded.

    Raises:
        UnsupportedOptionError: with the alternative.
    """
    if config.keep_last is not None:
        raise UnsupportedOptionError(
            f"{strategy}: keep_last={config.keep_last}: Lightning decides which checkpoints stay; give "
            f"ModelCheckpoint(save_top_k={config.keep_last}) instead"
        )
    refuse_background_shards(config, sharded, f"{strategy}: ")


def check_plugin_saves(strategy: str, config: CheckpointConfig, io: Any) -> None:
    """Raises if checkpoints are to be saved in the background, and a plugin of the user's writes them.

    Args:
        strategy: its name, for messages.
        config: the options.
        io: writes the checkpoints.

    Raises:
        UnsupportedOptionError: with the alternative.
    """
    if config.asynchronous and not isinstance(io, XLAEagerCheckpointIO):
        raise UnsupportedOptionError(
            f"{strategy}: asynchronous=True, and {type(io).__name__} writes the checkpoints: leave the plugin away, or "
            "the option"
        )


def _tidy(trainer: Trainer) -> None:
    io = trainer.strategy.checkpoint_io
    if isinstance(io, XLAEagerCheckpointIO):
        io.tidy()
