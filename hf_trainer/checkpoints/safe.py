"""`SafeCheckpoints`: transformers writes checkpoints, `CheckpointStore` commits them."""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import transformers
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import SaveStrategy

from hf_trainer.checkpoints.deferred_writes import DeferredWrites, deferring
from hf_trainer.checkpoints.exact_resume import save_rest
from hf_trainer.checkpoints.resume_check import ResumeCheck
from hf_trainer.checkpoints.stores import PREFIX, CheckpointStores, numbered
from xla_adapters.checkpoint import (
    AsyncSaver,
    CheckpointStore,
    CheckpointWarning,
    naming_failed_writes,
    refuse_inside_step,
)
from xla_adapters.errors import CheckpointWriteError


class SafeCheckpoints:
    """Under `safe_checkpoints=True` a checkpoint gets its name when it is complete. A crash leaves no half of one.

    transformers writes its files into a draft folder; the store adds a manifest and renames the folder.

    Args:
        trainer: the trainer.
        base: the methods that the mixin overrides.
        stores: commit and delete checkpoints.
        check: verifies a checkpoint before it is loaded.

    Attributes:
        resumed_from: the checkpoint that the training under way resumed from; None if it started from scratch.
    """

    def __init__(self, trainer: transformers.Trainer, base: Any, stores: CheckpointStores, check: ResumeCheck) -> None:
        self._trainer = trainer
        self._base = base
        self._stores = stores
        self._check = check
        self.resumed_from: Path | None = None
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
        """Around a training: verifies the checkpoint it resumes from, and starts the saver of `asynchronous=True`.

        Args:
            resume_from: `resume_from_checkpoint` as the user gave it.

        Yields:
            The path of the verified checkpoint, or what the user gave if nothing is verified.
        """
        if self._stores.are_used and resume_from:
            resume_from = self._check.path(resume_from)
        elif isinstance(resume_from, str):
            self._check.check_is_folder(resume_from)
        self.resumed_from = Path(str(resume_from)) if resume_from else None
        with ExitStack() as stack:
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
        state = self._trainer.state
        if not self._stores.are_used:
            with naming_failed_writes(f"checkpoint '{PREFIX}{state.global_step}'", self.output_dir(trial)):
                self._base._save_checkpoint(model, trial)
            return
        refuse_inside_step(state.global_step)
        self.settle()
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
            save_rest(self._trainer, folder)

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

    def settle(self) -> None:
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
        self.settle()
        if self._stores.are_used:
            self._check.verify_best()

    def finish(self, trial: Any) -> None:
        """Before `Trainer._finalize_training`, which under `save_total_limit=1` deletes all checkpoints but the best.

        Deletes them first: transformers deletes file by file, and a crash would leave half a checkpoint.
        """
        self.settle()
        args, best = self._trainer.args, self._trainer.state.best_model_checkpoint
        if not (self._stores.are_used and args.should_save and best is not None and args.save_total_limit == 1):
            return
        root = self._trainer._get_output_dir(trial)
        store = self._stores.of(root)
        for name in numbered(store):
            if not os.path.samefile(os.path.join(root, name), best):
                try:
                    store.remove(name)
                except CheckpointWriteError as error:
                    warnings.warn(str(error), CheckpointWarning, stacklevel=3)
