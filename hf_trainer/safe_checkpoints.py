"""Safe checkpoints: transformers writes them, `CheckpointStore` commits them, and checks them when they are loaded."""

from __future__ import annotations

import logging
import os
import re
import warnings
from collections.abc import Collection
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, SaveStrategy, get_last_checkpoint

from hf_trainer.deferred_writes import DeferredWrites, deferring
from hf_trainer.exact_resume import restore_rest, save_rest
from hf_trainer.trainer_hooks import TrainerHooks
from xla_adapters.checkpoint import (
    MANIFEST,
    AsyncSaver,
    Checkpoint,
    CheckpointConfig,
    CheckpointStore,
    CheckpointWarning,
    Watchdog,
    differences,
    refuse_inside_step,
    warn_of_differences,
)
from xla_adapters.errors import CheckpointNotFoundError, CheckpointWriteError

_log = logging.getLogger(__name__)
_PREFIX = f"{PREFIX_CHECKPOINT_DIR}-"
_DISTRIBUTIONS = ("transformers", "accelerate")
# What decides the losses. Named one by one: nothing else (tokens, paths, names of hosts) can get into a manifest.
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


class SafeCheckpointHooks(TrainerHooks):
    """With `safe_checkpoints=True` a checkpoint appears under its name whole, or not at all.

    Its files are those that transformers writes, and the manifest.
    """

    safe_checkpoints: bool
    checkpoint_config: CheckpointConfig
    # Where the checkpoint that is being saved is written.
    _draft_folder: str | None = None
    _to_push: str | None = None
    # Of the training under way; None if it waits for each save.
    _saver: AsyncSaver | None = None
    _committed_later: str | None = None
    _undo_best: str | None = None
    _resumed_from: str | None = None

    # ---- saving ----------------------------------------------------------------------------------

    def _get_output_dir(self, trial: Any) -> str:
        return self._draft_folder if self._draft_folder is not None else super()._get_output_dir(trial)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        if not self._saves_safely:
            super()._save_checkpoint(model, trial)
            return
        refuse_inside_step(self.state.global_step)
        self._settle()
        state, root = self.state, super()._get_output_dir(trial)
        name, former = f"{_PREFIX}{state.global_step}", state.best_model_checkpoint
        best = self._best_checkpoint(root)
        with ExitStack() as undo:
            undo.callback(setattr, state, "best_model_checkpoint", former)
            undo.callback(setattr, self, "_to_push", None)
            store = self._store(root, saving=name, best=best)
            if self._saver is None:
                with store.writing(state.global_step, name=name, settings=self._settings()) as draft:
                    self._write(draft.path, model, trial, best)
            else:
                self._save_in_background(self._saver, store, name, model, trial, best)
            self._undo_best = former
            undo.pop_all()
        if self._saver is None:
            self._push(os.path.join(root, name))
        else:
            self._committed_later = os.path.join(root, name)

    def _write(self, folder: Path, model: Any, trial: Any, best: str | None) -> None:
        """Has transformers write a checkpoint into a folder of its name."""
        self._draft_folder = str(folder.parent)
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self._draft_folder = None
        # transformers took the draft for the checkpoint.
        self.state.best_model_checkpoint = best
        if self.args.should_save:
            self.state.save_to_json(str(folder / TRAINER_STATE_NAME))
            save_rest(self, folder)

    def _save_in_background(
        self, saver: AsyncSaver, store: CheckpointStore, name: str, model: Any, trial: Any, best: str | None
    ) -> None:
        writes = DeferredWrites(name)
        with ExitStack() as undo:
            undo.callback(writes.discard)
            with deferring(writes):
                self._write(writes.folder, model, trial, best)
            saver.store = store
            step, settings = self.state.global_step, self._settings()
            saver.save(step, writes, DeferredWrites.finish, take=lambda taken: taken, name=name, settings=settings)
            undo.pop_all()

    def _settle(self) -> None:
        """Waits for the save in flight.

        Raises:
            CheckpointWriteError, or what the writer raised: it failed.
        """
        if self._saver is None:
            return
        path, self._committed_later = self._committed_later, None
        with ExitStack() as undo:
            if path is not None:
                undo.callback(setattr, self.state, "best_model_checkpoint", self._undo_best)
            self._saver.wait()
            undo.pop_all()
        if path is not None:
            self._push(path)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As `Trainer.save_model`; waits for a checkpoint that is being written."""
        if not _internal_call:
            self._settle()
        super().save_model(output_dir, _internal_call)

    def _push(self, path: str) -> None:
        if self._to_push is not None:
            self._to_push = None
            super()._push_from_checkpoint(path)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        # The upload goes on in the background, when the draft is not there any more.
        if self._draft_folder is not None:
            self._to_push = checkpoint_folder
            return
        super()._push_from_checkpoint(checkpoint_folder)

    def _best_checkpoint(self, root: str) -> str | None:
        """What transformers would make `best_model_checkpoint` when the step is saved."""
        step = self.state.best_global_step
        if step and self.args.save_strategy != SaveStrategy.NO:
            path = os.path.join(root, f"{_PREFIX}{step}")
            if step == self.state.global_step or os.path.isdir(path):
                return path
        return self.state.best_model_checkpoint

    def _finalize_training(self, trial: Any, *args: Any, **kwargs: Any) -> Any:
        self._settle()
        # transformers deletes these file by file, and a kill would leave half of one.
        best = self.state.best_model_checkpoint
        if self._saves_safely and self.args.should_save and best is not None and self.args.save_total_limit == 1:
            root = self._get_output_dir(trial)
            store = self._store(root)
            for name in _own_names(store):
                if not os.path.samefile(os.path.join(root, name), best):
                    try:
                        store.remove(name)
                    except CheckpointWriteError as error:
                        warnings.warn(str(error), CheckpointWarning, stacklevel=2)
        return super()._finalize_training(trial, *args, **kwargs)  # type: ignore[no-untyped-call]

    # ---- loading ---------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """As `Trainer.train`; what is resumed from is checked."""
        if self._saves_safely and resume_from_checkpoint:
            resume_from_checkpoint = self._checked(resume_from_checkpoint)
        self._resumed_from = str(resume_from_checkpoint) if resume_from_checkpoint else None
        with ExitStack() as stack:
            if self.checkpoint_config.asynchronous:
                stack.callback(setattr, self, "_saver", None)
                self._saver = stack.enter_context(AsyncSaver(self._store(self._get_output_dir(None))))
            return super().train(resume_from_checkpoint, *args, **kwargs)

    def weights_are_loaded(self) -> None:
        """A training begins; what transformers forgot goes on (called by the first callback)."""
        super().weights_are_loaded()  # type: ignore[misc]
        if self._resumed_from is not None:
            restore_rest(self, Path(self._resumed_from))

    def _load_best_model(self) -> None:
        self._settle()
        best = self.state.best_model_checkpoint
        if self._saves_safely and best is not None and (Path(best) / MANIFEST).exists():
            self._store(os.path.dirname(best)).load(os.path.abspath(best))
        super()._load_best_model()

    def _checked(self, asked: str | bool) -> str:
        """The checkpoint to resume from.

        Args:
            asked: a path, or True for the newest valid one in `output_dir`; where none has a manifest, the newest.

        Raises:
            CheckpointNotFoundError: there is none that could be.
            CheckpointDamagedError: that at the path is not what was written.
        """
        if asked is True:
            root = self._get_output_dir(None)
            newest = self._store(root).newest_valid()
            if newest is not None:
                self._compare(newest)
                return os.path.join(root, newest.name)
            # Those of transformers' own trainer, of before.
            asked = get_last_checkpoint(root) or ""
            if not asked:
                raise CheckpointNotFoundError(f"resume_from_checkpoint=True: no checkpoint in {root} is valid")
        path = str(asked)
        if (Path(path) / MANIFEST).exists():
            real = os.path.realpath(path)
            self._compare(self._store(os.path.dirname(real)).load(real))
        else:
            _log.warning("%s has no manifest: it is loaded as it is, unchecked", path)
        return path

    def _compare(self, checkpoint: Checkpoint) -> None:
        lines = differences(
            checkpoint.manifest,
            settings=self._settings(),
            distributions=_DISTRIBUTIONS,
            world={"processes": 1, "devices": self._devices},
        )
        warn_of_differences(checkpoint, lines)

    # ---- the store -------------------------------------------------------------------------------

    @property
    def _saves_safely(self) -> bool:
        # In several processes each would commit a draft of its own.
        return self.safe_checkpoints and self.args.world_size == 1

    @property
    def _devices(self) -> int:
        return self._backend.device_count() if self._sharder is not None else 1

    def _store(self, root: str, *, saving: str | None = None, best: str | None = None) -> CheckpointStore:
        """The checkpoints in a folder; while one is saved, with the rotation of `keep_last`, or transformers' own."""
        where = os.path.abspath(root)
        config, limit = self.checkpoint_config, self.args.save_total_limit
        keep_last = keep_every = None
        protected: Collection[str] = ()
        if config.keep_last is not None:
            keep_last, keep_every = config.keep_last if saving is not None else None, config.keep_every
            protected = () if best is None else (os.path.basename(best),)
        elif saving is not None and limit is not None and limit > 0:
            keep_last = 1
            protected = _staying(CheckpointStore(where, prefix=_PREFIX), saving, limit, best)
        return CheckpointStore(
            where,
            prefix=_PREFIX,
            keep_last=keep_last,
            keep_every=keep_every,
            protected=protected,
            distributions=_DISTRIBUTIONS,
            devices=self._devices,
            watchdog=Watchdog(config.stall_deadline),
        )

    def _settings(self) -> dict[str, Any]:
        values = {name: getattr(self.args, name) for name in SETTINGS}
        sharding = self.sharding_config
        return {
            "arguments": values,
            "xla": {**asdict(self.xla_config), "rng_algorithm": self._random_algorithm},
            "sharding": None if sharding is None else {"scheme": sharding.scheme, "mesh_shape": sharding.mesh_shape},
        }


def _own_names(store: CheckpointStore) -> list[str]:
    """Those with a manifest that transformers would count, oldest first."""
    names = [checkpoint.name for checkpoint in store.checkpoints()]
    return [name for name in names if re.fullmatch(rf"{_PREFIX}\d+", name)]


def _staying(store: CheckpointStore, saving: str, limit: int, best: str | None) -> set[str]:
    """The names that `save_total_limit` leaves: the newest, and the best one, which counts."""
    others = [name for name in _own_names(store) if name != saving]
    kept = os.path.basename(best) if best is not None and os.path.dirname(os.path.abspath(best)) == store.root else None
    removable = [name for name in others if name != kept]
    excess = len(others) + 1 - max(limit, 1 + (kept in others))
    return {checkpoint.name for checkpoint in store.checkpoints()} - set(removable[: max(0, excess)])
