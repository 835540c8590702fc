"""Trainers of sentence-transformers on XLA devices: what each takes as the library's own, and the options of
`XLATrainerMixin`.
"""

# ruff: noqa: E402 (what is missing is said first)

from hf_trainer._requirements import require

require("hf_trainer.sentence_transformers", "ecosystem", sentence_transformers="sentence-transformers")

import sentence_transformers

from hf_trainer.mixin import XLATrainerMixin

__all__ = ["CrossEncoderTrainer", "SentenceTransformerTrainer", "SparseEncoderTrainer"]


class SentenceTransformerTrainer(XLATrainerMixin, sentence_transformers.SentenceTransformerTrainer):  # type: ignore[misc]
    """`sentence_transformers.SentenceTransformerTrainer` on XLA devices, with the options of `XLATrainerMixin`."""


class CrossEncoderTrainer(XLATrainerMixin, sentence_transformers.CrossEncoderTrainer):  # type: ignore[misc]
    """`sentence_transformers.CrossEncoderTrainer` on XLA devices, with the options of `XLATrainerMixin`."""


class SparseEncoderTrainer(XLATrainerMixin, sentence_transformers.SparseEncoderTrainer):  # type: ignore[misc]
    """`sentence_transformers.SparseEncoderTrainer` on XLA devices, with the options of `XLATrainerMixin`."""
