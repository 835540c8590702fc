"""Function outlining: what a graph repeats (layers, updates of equal parameters) is compiled once and called.

Steps: `regions` finds repeated subgraphs, `merging` joins those that always occur together, `loops` (with `peeling`)
finds those that can be a `while` loop, `outlined_function` and `loop_writer` write them, `outline` drives all of it.
"""

from xla_adapters.cpu.graph_passes.outlining.outline import Outlined, outline
from xla_adapters.hlo.graph import UnsupportedModuleError

__all__ = ["Outlined", "UnsupportedModuleError", "outline"]
