"""Checkpoints in Lightning's formats, and exact resume from them."""

from lightning_strategy.checkpoints.io import XLAEagerCheckpointIO

__all__ = ["XLAEagerCheckpointIO"]
