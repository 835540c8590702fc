"""HuggingFace Trainer on XLA devices."""

from hf_trainer.arguments import XLAArguments
from hf_trainer.callbacks import XLAStatsCallback
from hf_trainer.mixin import XLATrainerMixin
from hf_trainer.optimizers import register_transformers_optimizers
from hf_trainer.trainer import Seq2SeqTrainer, Trainer

__all__ = ["Seq2SeqTrainer", "Trainer", "XLAArguments", "XLAStatsCallback", "XLATrainerMixin"]

register_transformers_optimizers()
