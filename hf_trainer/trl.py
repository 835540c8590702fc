"""Trainers of TRL on XLA devices: what each takes as TRL's own, and the options of `XLATrainerMixin`."""

# ruff: noqa: E402 (what is missing is said first)

from hf_trainer._requirements import require

require("hf_trainer.trl", "ecosystem", trl="TRL")

import trl

from hf_trainer.mixin import XLATrainerMixin

__all__ = ["DPOTrainer", "GRPOTrainer", "KTOTrainer", "RewardTrainer", "SFTTrainer"]


class SFTTrainer(XLATrainerMixin, trl.SFTTrainer):  # type: ignore[misc]
    """`trl.SFTTrainer` on XLA devices: the same arguments, and those of `XLATrainerMixin`."""


class DPOTrainer(XLATrainerMixin, trl.DPOTrainer):  # type: ignore[misc]
    """`trl.DPOTrainer` on XLA devices: the same arguments, and those of `XLATrainerMixin`."""


class RewardTrainer(XLATrainerMixin, trl.RewardTrainer):  # type: ignore[misc]
    """`trl.RewardTrainer` on XLA devices: the same arguments, and those of `XLATrainerMixin`."""


class KTOTrainer(XLATrainerMixin, trl.KTOTrainer):  # type: ignore[misc]
    """`trl.KTOTrainer` on XLA devices: the same arguments, and those of `XLATrainerMixin`."""


class GRPOTrainer(XLATrainerMixin, trl.GRPOTrainer):  # type: ignore[misc]
    """`trl.GRPOTrainer` on XLA devices: the same arguments, and those of `XLATrainerMixin`."""
