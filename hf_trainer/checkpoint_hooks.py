"""Checkpoint hooks: what was saved is what is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import transformers

from hf_trainer.trainer_hooks import TrainerHooks
from hf_trainer.weights import load_renamed_weights
from xla_adapters.transfers import uploading


class CheckpointHooks(TrainerHooks):
    """Loads checkpoints whose weights are named otherwise on disk (see `weights`)."""

    _loading_from: str | None = None

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        self._loading_from = resume_from_checkpoint
        try:
            with self._loading():
                super()._load_from_checkpoint(resume_from_checkpoint, model)
        finally:
            self._loading_from = None

    def _load_best_model(self) -> None:
        self._loading_from = self.state.best_model_checkpoint
        try:
            with self._loading():
                super()._load_best_model()
        finally:
            self._loading_from = None

    @contextmanager
    def _loading(self) -> Iterator[None]:
        # One execution instead of one per weight; and a weight that is overwritten eagerly would lose its cut.
        with uploading():
            yield
        self._backend.flush()

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        if load_result.unexpected_keys and self._loading_from and isinstance(self.model, transformers.PreTrainedModel):
            load_renamed_weights(self.model, self._loading_from)
            return
        super()._issue_warnings_after_load(load_result)
