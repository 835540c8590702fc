"""Checkpoints of the trainer: when they are saved, how they are written, verified and loaded."""
