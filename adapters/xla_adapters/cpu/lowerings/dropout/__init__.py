"""Dropout on CPU devices, with masks that are cheap to draw and to compile.

torch_xla draws an integer per element, converts it to a float and compares. XLA:CPU computes both output words of
Threefry for each element and uses one. And the seed of the n-th draw of a step is a chain of n operations, so no two
dropout kernels are equal, and each is compiled: 40% of the compile time of a GPT-2 of 12 layers.
"""

from xla_adapters.cpu.lowerings.dropout.lowerings import Dropout

__all__ = ["Dropout"]
