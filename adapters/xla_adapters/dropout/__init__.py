"""Dropout on CPU devices: masks that are drawn in the least a step can spend on them.

torch_xla draws a number for each element, makes a float of it and a mask of that. Written as XLA's own operation, the
generator's two halves are put one behind the other, and the loop that the compiler makes of it computes both for each
element. And each draw computes its seed by a chain as long as its number in the step, so that no two kernels are alike:
40% of what a GPT-2 of 12 layers took to compile.
"""

from xla_adapters.dropout.lowerings import Dropout

__all__ = ["Dropout"]
