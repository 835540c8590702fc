"""`ResumeCheck`: verifies a checkpoint before a run resumes from it."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import transformers
from transformers.trainer_utils import get_last_checkpoint

from hf_trainer.checkpoints.stores import CheckpointStores
from xla_adapters.checkpoint import IF_ON_PURPOSE, MANIFEST
from xla_adapters.errors import CheckpointDamagedError, CheckpointNotFoundError

_log = logging.getLogger(__name__)


class ResumeCheck:
    """Finds the checkpoint that a run resumes from, and verifies it by its manifest.

    Args:
        trainer: the trainer.
        stores: load checkpoints.
    """

    def __init__(self, trainer: transformers.Trainer, stores: CheckpointStores) -> None:
        self._trainer = trainer
        self._stores = stores

    def path(self, asked: str | bool) -> str:
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
            newest = self._stores.of(root).newest_valid()
            if newest is not None:
                self._stores.compare(newest)
                return os.path.join(root, newest.name)
            # Checkpoints of transformers' own trainer have no manifest.
            asked = get_last_checkpoint(root) or ""
            if not asked:
                raise CheckpointNotFoundError(
                    f"resume_from_checkpoint=True: No valid checkpoint found in output directory ({root})"
                )
        path = str(asked)
        self.check_is_folder(path)
        if (Path(path) / MANIFEST).exists():
            real = os.path.realpath(path)
            try:
                checkpoint = self._stores.of(os.path.dirname(real)).load(real)
            except CheckpointDamagedError as error:
                raise CheckpointDamagedError(f"{error.args[0]}. {IF_ON_PURPOSE}") from error
            self._stores.compare(checkpoint)
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
        there = ", ".join(checkpoint.name for checkpoint in self._stores.of(root).checkpoints()) or "no checkpoint"
        # Its first words are those of transformers' error.
        raise CheckpointNotFoundError(f"Can't find a valid checkpoint at {path}: {what} (in {root}: {there})")

    def verify_best(self) -> None:
        """Verifies the best checkpoint, if it has a manifest.

        Raises:
            CheckpointDamagedError: its files are not those that were saved.
        """
        best = self._trainer.state.best_model_checkpoint
        if best is not None and (Path(best) / MANIFEST).exists():
            self._stores.of(os.path.dirname(best)).load(os.path.abspath(best))
