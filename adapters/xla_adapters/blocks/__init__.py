"""Blocks that a graph repeats (layers, updates of alike parameters), as computations that are called."""

from xla_adapters.blocks.outline import Outlined, outline
from xla_adapters.hlo_graph.graph import NotUnderstood

__all__ = ["NotUnderstood", "Outlined", "outline"]
