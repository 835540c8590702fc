"""Kernels for torch's operators that torch_xla computes on the host, computes wrongly, or does not autocast.

They are registered with torch's dispatcher for the rest of the process, below everything that Python sees of a call:
a call from C++ or from the backward is computed by them as well.
"""

from xla_adapters.runtime.torch_xla.operators.autocast import complete_autocast
from xla_adapters.runtime.torch_xla.operators.registration import register_kernels

__all__ = ["complete_autocast", "register_kernels"]
