"""HuggingFace Trainer on XLA devices."""

from pathlib import Path

import hf_trainer._requirements  # noqa: F401 (raises)
from hf_trainer.bridge import XLAStatsCallback
from hf_trainer.mixin import XLATrainerMixin
from hf_trainer.model import register_transformers_optimizers
from hf_trainer.options import XLAArguments
from hf_trainer.patches import tell_accelerate_of_ranks
from hf_trainer.trainer import Seq2SeqTrainer, Trainer
from xla_adapters.runtime import prepare
from xla_adapters.utils.location import hide_folder

__all__ = ["Seq2SeqTrainer", "Trainer", "XLAArguments", "XLAStatsCallback", "XLATrainerMixin"]

hide_folder(Path(__file__).parent)
register_transformers_optimizers()
# `transformers.TrainingArguments` start the runtime, before there is a Trainer.
prepare()
tell_accelerate_of_ranks()
