"""The trainers: transformers' own with the mixin before them."""

from __future__ import annotations

import transformers

from hf_trainer.mixin import XLATrainerMixin


class Trainer(XLATrainerMixin, transformers.Trainer):
    """`transformers.Trainer` on XLA devices: the same arguments, and those of `XLATrainerMixin`."""
