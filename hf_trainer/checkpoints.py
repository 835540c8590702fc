"""Checkpoints of the trainer: when they are saved, how they are committed, verified and resumed from."""

from __future__ import annotations

import functools
import logging
import os
import re
import tempfile
import warnings
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import transformers
from transformers import TrainerControl
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, SaveStrategy, get_last_checkpoint

from hf_trainer.data import gathers_on_device
from hf_trainer.options import TrainerOptions
from hf_trainer.resume import save_rest, unlogged_loss
from hf_trainer.saving import DeferredWrites, deferring
from xla_adapters import get_runtime
from xla_adapters.checkpoint import (
    IF_ON_PURPOSE,
    MANIFEST,
    AsyncSaver,
    Checkpoint,
    CheckpointConfig,
    CheckpointStore,
    CheckpointWarning,
    TorchGroup,
    Watchdog,
    naming_failed_writes,
    refuse_inside_step,
)
from xla_adapters.errors import CheckpointDamagedError, CheckpointError, CheckpointNotFoundError
from xla_adapters.loop.checkpoints import ScheduledSaves, settings_for_manifest, warn_of_differences
from xla_adapters.loop.steps import StepDriver

PREFIX = f"{PREFIX_CHECKPOINT_DIR}-"
_DISTRIBUTIONS = ("transformers", "accelerate")
# Training arguments that influence the losses. Listed one by one, so that no token, path or name of a host gets into
# a manifest.
SETTINGS = (
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "bf16",
    "data_seed",
    "dataloader_drop_last",
    "full_determinism",
    "gradient_accumulation_steps",
    "ignore_data_skip",
    "label_smoothing_factor",
    "learning_rate",
    "lr_scheduler_type",
    "max_grad_norm",
    "max_steps",
    "neftune_noise_alpha",
    "num_train_epochs",
    "optim",
    "optim_args",
    "per_device_train_batch_size",
    "seed",
    "train_sampling_strategy",
    "warmup_steps",
    "weight_decay",
)


class CheckpointStores:
    """Makes the `CheckpointStore` of a folder, with the rotation and the manifest that the trainer's options ask for.

    Args:
        trainer: its arguments are written into manifests.
        options: the XLA options.
        devices: how many train together.
        random_algorithm: that the device uses.
    """

    def __init__(
        self, trainer: transformers.Trainer, options: TrainerOptions, devices: int, random_algorithm: str
    ) -> None:
        self._trainer = trainer
        self._options = options
        self._devices = devices
        self._random_algorithm = random_algorithm
        ranks = get_runtime().device.ranks
        self._group = None if ranks is None else TorchGroup(ranks.for_saving)

    @property
    def are_used(self) -> bool:
        """Whether checkpoints are committed and verified. Processes that are no ranks would each commit a draft."""
        return self._options.safe_checkpoints and not gathers_on_device(self._trainer)

    @property
    def asynchronous(self) -> bool:
        """Whether checkpoints are written in the background."""
        return self._options.checkpoint.asynchronous

    @property
    def settings(self) -> dict[str, Any]:
        """What a manifest records of the options, to compare with when a run resumes."""
        values = {name: getattr(self._trainer.args, name) for name in SETTINGS}
        return settings_for_manifest(
            {"arguments": values},
            self._options.config,
            self._options.sharding,
            rng_algorithm=self._random_algorithm,
        )

    def of(self, root: str) -> CheckpointStore:
        """The store of a folder, to load from. It deletes nothing."""
        return self._make(root)

    def saving(self, root: str, name: str, best: str | None) -> CheckpointStore:
        """The store of a folder, to save to. It deletes old checkpoints by `keep_last`, or by `save_total_limit`.

        Args:
            root: the folder of the checkpoints.
            name: of the checkpoint to be saved.
            best: path of the best checkpoint, which is kept.
        """
        config, limit = self._options.checkpoint, self._trainer.args.save_total_limit
        if config.keep_last is not None:
            protected = () if best is None else (os.path.basename(best),)
            return self._make(root, keep_last=config.keep_last, keep_every=config.keep_every, protected=protected)
        if limit is not None and limit > 0:
            return self._make(root, keep_last=1, protected=_kept_by_limit(self._make(root), name, limit, best))
        return self._make(root)

    def compare(self, checkpoint: Checkpoint) -> None:
        """Warns if a checkpoint was saved with other options, versions or devices than those of this run."""
        warn_of_differences(checkpoint, self.settings, distributions=_DISTRIBUTIONS, devices=self._devices)

    # ---- resuming ------------------------------------------------------------------------------

    def checked(self, asked: str | bool) -> str:
        """The checkpoint to resume from.

        Args:
            asked: a path, or True for the newest valid checkpoint in `output_dir`. If none there has a manifest, True
                stands for the newest one.

        Raises:
            CheckpointNotFoundError: there is no checkpoint, or a file.
            CheckpointDamagedError: the files at the path are not those that were saved.
        """
        if asked is True:
            root = self._trainer._get_output_dir(None)
            newest = self.of(root).newest_valid()
            if newest is not None:
                self.compare(newest)
                return os.path.join(root, newest.name)
            # Checkpoints of transformers' own trainer have no manifest.
            asked = get_last_checkpoint(root) or ""
            if not asked:
                raise CheckpointNotFoundError(
                    f"resume_from_checkpoint=True: No valid checkpoint found in output directory ({root}). "
                    "Leave the argument out to train from the start"
                )
        path = str(asked)
        self.check_is_folder(path)
        if (Path(path) / MANIFEST).exists():
            real = os.path.realpath(path)
            try:
                checkpoint = self.of(os.path.dirname(real)).load(real)
            except CheckpointDamagedError as error:
                raise CheckpointDamagedError(f"{error.args[0]}. {IF_ON_PURPOSE}") from error
            self.compare(checkpoint)
        else:
            _log.warning("%s has no manifest: it is loaded as it is, unchecked", path)
        return path

    def check_is_folder(self, path: str) -> None:
        """Raises unless there is a folder at a path.

        Raises:
            CheckpointNotFoundError: nothing is there, or a file; with the checkpoints that there are.
        """
        if os.path.isdir(path):
            return
        if os.path.exists(path):
            what = f"it is a file, and a checkpoint is a folder; did you mean {os.path.dirname(os.path.abspath(path))}?"
        else:
            what = "nothing is there"
        root = self._trainer._get_output_dir(None)
        there = ", ".join(checkpoint.name for checkpoint in self.of(root).checkpoints()) or "no checkpoint"
        # Its first words are those of transformers' error.
        raise CheckpointNotFoundError(f"Can't find a valid checkpoint at {path}: {what} (in {root}: {there})")

    def verify_best(self) -> None:
        """Verifies the best checkpoint, if it has a manifest.

        Raises:
            CheckpointDamagedError: its files are not those that were saved.
            CheckpointNotFoundError: some of the ranks do not have it.
        """
        best = self._trainer.state.best_model_checkpoint
        is_there = best is not None and (Path(best) / MANIFEST).exists()
        ranks = get_runtime().device.ranks
        if ranks is not None:
            without = [rank for rank, there in enumerate(ranks.gather(is_there, "the best checkpoint")) if not there]
            if 0 < len(without) < ranks.size:
                raise CheckpointNotFoundError(
                    f"rank {without[0]} does not have the best checkpoint ({best}), which another one has: give all "
                    "ranks one output_dir, in a folder that they share"
                )
        if best is not None and is_there:
            self.of(os.path.dirname(best)).load(os.path.abspath(best))

    def _make(
        self,
        root: str,
        *,
        keep_last: int | None = None,
        keep_every: int | None = None,
        protected: Collection[str] = (),
    ) -> CheckpointStore:
        return CheckpointStore(
            os.path.abspath(root),
            prefix=PREFIX,
            keep_last=keep_last,
            keep_every=keep_every,
            protected=protected,
            distributions=_DISTRIBUTIONS,
            devices=self._devices,
            group=self._group,
            watchdog=Watchdog(self._options.checkpoint.stall_deadline),
            trust_files=self._options.checkpoint.trust_files,
        )


def numbered(store: CheckpointStore) -> list[str]:
    """Names of the checkpoints with a manifest that `save_total_limit` counts, oldest first."""
    names = [checkpoint.name for checkpoint in store.checkpoints()]
    return [name for name in names if re.fullmatch(rf"{PREFIX}\d+", name)]


def _kept_by_limit(store: CheckpointStore, saving: str, limit: int, best: str | None) -> set[str]:
    """Names that `save_total_limit` keeps besides the one being saved: the newest, and the best, which counts."""
    others = [name for name in numbered(store) if name != saving]
    kept = os.path.basename(best) if best is not None and os.path.dirname(os.path.abspath(best)) == store.root else None
    removable = [name for name in others if name != kept]
    excess = len(others) + 1 - max(limit, 1 + (kept in others))
    return {checkpoint.name for checkpoint in store.checkpoints()} - set(removable[: max(0, excess)])


_log = logging.getLogger(__name__)


class SafeCheckpoints:
    """Under `safe_checkpoints=True` a checkpoint gets its name when it is complete. A crash leaves no half of one.

    transformers writes its files into a draft folder; the store adds a manifest and renames the folder.

    Args:
        trainer: the trainer.
        base: the methods that the mixin overrides.
        stores: commit, verify and delete checkpoints.
        config: when to save, beside the trainer's own schedule.

    Attributes:
        steps: mention the newest checkpoint in their errors.
        resumed_from: the checkpoint that the training under way resumed from; None if it started from scratch.
    """

    steps: StepDriver
    _saves: ScheduledSaves

    def __init__(
        self, trainer: transformers.Trainer, base: Any, stores: CheckpointStores, config: CheckpointConfig
    ) -> None:
        self._trainer = trainer
        self._base = base
        self._stores = stores
        self._config = config
        # Steps done and entries logged at the last save. A later evaluation adds an entry that is not saved.
        self._saved_at = (-1, -1)
        self.resumed_from: Path | None = None
        # The sum of losses that is saved.
        self._unlogged = 0.0
        # The folder in which transformers creates the checkpoint being written.
        self._draft_folder: str | None = None
        # Path given by transformers for the upload to the hub, which waits for the commit.
        self._to_push: str | None = None
        # Saves in the background during a training with `asynchronous=True`.
        self._saver: AsyncSaver | None = None
        # The checkpoint that the saver is writing, and `best_model_checkpoint` before it.
        self._in_flight: str | None = None
        self._best_before: str | None = None

    @contextmanager
    def training(self, resume_from: str | bool | None) -> Iterator[str | bool | None]:
        """Around a training: verifies the checkpoint it resumes from; handles signals, and saves in the background.

        Args:
            resume_from: `resume_from_checkpoint` as the user gave it.

        Yields:
            The path of the verified checkpoint, or what the user gave if nothing is verified.
        """
        if self._stores.are_used and resume_from:
            resume_from = self._stores.checked(resume_from)
        elif isinstance(resume_from, str):
            self._stores.check_is_folder(resume_from)
        self.resumed_from = Path(str(resume_from)) if resume_from else None
        self._saves = ScheduledSaves(self._config)
        with ExitStack() as stack:
            stack.enter_context(self._saves.receiving_signals())
            if self._stores.asynchronous:
                stack.callback(setattr, self, "_saver", None)
                root = self._trainer._get_output_dir(None)
                self._saver = stack.enter_context(AsyncSaver(self._stores.of(root)))
            yield resume_from

    # ---- saving ----------------------------------------------------------------------------------

    def output_dir(self, trial: Any) -> str:
        """As `Trainer._get_output_dir`; the draft folder while a checkpoint is written."""
        if self._draft_folder is not None:
            return self._draft_folder
        folder: str = self._base._get_output_dir(trial)
        return folder

    def save(self, model: Any, trial: Any) -> None:
        """As `Trainer._save_checkpoint`.

        Raises:
            CheckpointWriteError: this save failed, or the one in the background before it.
        """
        self._save(model, trial)
        self._note_saved(trial)

    def _save(self, model: Any, trial: Any) -> None:
        state = self._trainer.state
        if not self._stores.are_used:
            with naming_failed_writes(f"checkpoint '{PREFIX}{state.global_step}'", self.output_dir(trial)):
                self._base._save_checkpoint(model, trial)
            return
        refuse_inside_step(state.global_step)
        ranks = get_runtime().device.ranks
        if ranks is not None:
            # All save, or it is an error.
            ranks.wait(f"the save after step {state.global_step}")
        self._unlogged = unlogged_loss(self._trainer)
        self.finish_pending()
        root = self._base._get_output_dir(trial)
        name, best_before = f"{PREFIX}{state.global_step}", state.best_model_checkpoint
        best = self._best_after_saving(root)
        with ExitStack() as undo:
            undo.callback(setattr, state, "best_model_checkpoint", best_before)
            undo.callback(setattr, self, "_to_push", None)
            store = self._stores.saving(root, name, best)
            if self._saver is None:
                with store.writing(state.global_step, name=name, settings=self._stores.settings) as draft:
                    self._write(draft.path, model, trial, best)
            else:
                self._save_in_background(self._saver, store, name, model, trial, best)
            self._best_before = best_before
            undo.pop_all()
        if self._saver is None:
            self._push_committed(os.path.join(root, name))
        else:
            self._in_flight = os.path.join(root, name)

    def _write(self, folder: Path, model: Any, trial: Any, best: str | None) -> None:
        """Makes transformers write a checkpoint into a folder, whose name must be that of the checkpoint."""
        self._draft_folder = str(folder.parent)
        try:
            self._base._save_checkpoint(model, trial)
        finally:
            self._draft_folder = None
        # transformers has set it to a path in the draft folder.
        self._trainer.state.best_model_checkpoint = best
        if self._trainer.args.should_save:
            self._trainer.state.save_to_json(str(folder / TRAINER_STATE_NAME))
        save_rest(self._trainer, folder, self._unlogged)

    def _save_in_background(
        self, saver: AsyncSaver, store: CheckpointStore, name: str, model: Any, trial: Any, best: str | None
    ) -> None:
        with ExitStack() as undo:
            with naming_failed_writes(
                f"checkpoint {name!r}, which is put together there first,", tempfile.gettempdir()
            ):
                writes = DeferredWrites(name)
                undo.callback(writes.discard)
                with deferring(writes):
                    self._write(writes.folder, model, trial, best)
            saver.store = store
            step, settings = self._trainer.state.global_step, self._stores.settings
            saver.save(step, writes, DeferredWrites.finish, take=lambda taken: taken, name=name, settings=settings)
            undo.pop_all()

    def finish_pending(self) -> None:
        """Waits for the save in the background.

        Raises:
            CheckpointWriteError, or what the writer raised: it failed.
        """
        if self._saver is None:
            return
        path, self._in_flight = self._in_flight, None
        with ExitStack() as undo:
            if path is not None:
                undo.callback(setattr, self._trainer.state, "best_model_checkpoint", self._best_before)
            self._saver.wait()
            undo.pop_all()
        if path is not None:
            self._push_committed(path)

    def _best_after_saving(self, root: str) -> str | None:
        """The `best_model_checkpoint` that transformers will set when it saves this step."""
        step = self._trainer.state.best_global_step
        if step and self._trainer.args.save_strategy != SaveStrategy.NO:
            path = os.path.join(root, f"{PREFIX}{step}")
            if step == self._trainer.state.global_step or os.path.isdir(path):
                return path
        return self._trainer.state.best_model_checkpoint

    # ---- the schedule ----------------------------------------------------------------------------

    def step_is_done(self, control: TrainerControl) -> None:
        """An optimizer step and its callbacks are done: asks the loop for a checkpoint if one is due."""
        if self._saves.are_due(self._trainer.state.global_step):
            control.should_save = True

    def _note_saved(self, trial: Any) -> None:
        """A checkpoint was saved, or is being saved in the background."""
        state = self._trainer.state
        self._saves.saved(state.global_step)
        self.steps.train.note_checkpoint(
            os.path.join(self._base._get_output_dir(trial), f"{PREFIX}{state.global_step}")
        )
        self._saved_at = (state.global_step, len(state.log_history))

    def save_before_evaluation(self, model: Any, trial: Any) -> None:
        """Saves if the training is to end: the evaluation may take longer than the time that is left."""
        trainer = self._trainer
        if self._saves.can_still_save(trainer.state.global_step) and trainer.control.should_evaluate:
            trainer._save_checkpoint(model, trial)

    def end_if_asked(self, model: Any, trial: Any) -> None:
        """Saves and ends the process if a signal asked for it.

        Raises:
            SystemExit: with the exit status of the config.
        """
        if not self._saves.end_is_near:
            return
        trainer, state = self._trainer, self._trainer.state
        is_saved = self._saved_at == (state.global_step, len(state.log_history))
        save = None if is_saved else functools.partial(trainer._save_checkpoint, model, trial)
        self._saves.save_before_end(state.global_step, save, self.finish_pending)
        raise SystemExit(self._saves.exit_code)

    # ---- uploads to the hub ------------------------------------------------------------------------

    def push(self, checkpoint_folder: str) -> None:
        """As `Trainer._push_from_checkpoint`. The upload of a draft waits for the commit, which renames the folder."""
        if self._draft_folder is not None:
            self._to_push = checkpoint_folder
            return
        self._base._push_from_checkpoint(checkpoint_folder)

    def _push_committed(self, path: str) -> None:
        if self._to_push is not None:
            self._to_push = None
            self._base._push_from_checkpoint(path)

    # ---- the end of a training -------------------------------------------------------------------

    def verify_best(self) -> None:
        """Verifies the best checkpoint before it is loaded.

        Raises:
            CheckpointDamagedError: its files are not those that were saved.
        """
        self.finish_pending()
        if self._stores.are_used:
            self._stores.verify_best()

    def finish(self, trial: Any) -> None:
        """Before `Trainer._finalize_training`, which under `save_total_limit=1` deletes all checkpoints but the best.

        Deletes them first: transformers deletes file by file, and a crash would leave half a checkpoint.
        """
        self.finish_pending()
        args, best = self._trainer.args, self._trainer.state.best_model_checkpoint
        if not (self._stores.are_used and best is not None and args.save_total_limit == 1):
            return
        root = self._trainer._get_output_dir(trial)
        store = self._stores.of(root)
        for name in numbered(store):
            if not os.path.samefile(os.path.join(root, name), best):
                try:
                    store.remove(name)
                except CheckpointError as error:
                    warnings.warn(str(error), CheckpointWarning, stacklevel=3)


_log = logging.getLogger(__name__)
