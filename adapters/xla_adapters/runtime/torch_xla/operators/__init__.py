"""Kernels for torch's operators that torch_xla computes wrongly, on the host, or not at all, or does not autocast.

They are registered with torch's dispatcher for the rest of the process, below everything that Python sees of a call:
a call from C++ or from the backward is computed by them as well. `xla_adapters.lowerings` says which fix of an operator
belongs here, and which belongs there. A kernel goes when torch_xla computes as torch does; the folder goes with
torch_xla.
"""

from xla_adapters.runtime.torch_xla.operators import arithmetic, indexing, layers, reductions, windows
from xla_adapters.runtime.torch_xla.operators.autocast import complete_autocast
from xla_adapters.runtime.torch_xla.operators.registration import kernel_replaced, register

__all__ = ["complete_autocast", "kernel_replaced", "register_kernels"]

_ALL = (arithmetic.KERNELS, reductions.KERNELS, indexing.KERNELS, windows.KERNELS, layers.KERNELS)


def register_kernels() -> None:
    """Registers the kernels with torch's dispatcher, for the rest of the process."""
    if register(_ALL):
        layers.complete_gru()
