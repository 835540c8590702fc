"""An optimizer's state in few buffers: a step's graph with one input, and one update, for many small tensors.

What a call of an executable costs the host grows with the number of its inputs and outputs, most of which are an
optimizer's state of small parameters. Elementwise updates do not care how the numbers lie, so the state of many
parameters can be one row of numbers, and gradients that a step leaves behind another. (Flat buffers, as in DeepSpeed's
ZeRO, but parameters stay tensors of their own.)
"""

from xla_adapters.packing.forms import Owner
from xla_adapters.packing.graph import PackedModule, packed

__all__ = ["Owner", "PackedModule", "packed"]
