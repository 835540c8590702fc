"""Blocks that a graph repeats (layers, updates of alike parameters), as computations that are called."""

from xla_adapters.blocks.graph import NotUnderstood
from xla_adapters.blocks.outline import Outlined, outline

__all__ = ["NotUnderstood", "Outlined", "outline"]
