"""Operators of torch that are rewritten in plain torch while a step is traced, by torch function; on any runtime.

Where the fix of an operator belongs:
- here, if a step cannot be traced with torch's own (its Python reads a value, its graph differs from call to call), or
  if it would not stay sharded. What is here acts in steps only, and sees the calls of Python code only.
- `runtime/torch_xla/operators`, if torch_xla computes it wrongly, on the host, or not at all. A kernel acts everywhere,
  also on calls from C++ and in the backward.
- `cpu`, if it is right and only slow on XLA:CPU.
"""

from xla_adapters.lowerings.layers import ATTENTION, NORMS, cumulative_average, norm_with_torchs_variance
from xla_adapters.lowerings.operators import (
    LOWERINGS,
    ctc_of_padded_labels,
    grouped_products,
    is_write_by_mask,
    write_where_,
)

__all__ = [
    "ATTENTION",
    "LOWERINGS",
    "NORMS",
    "ctc_of_padded_labels",
    "cumulative_average",
    "grouped_products",
    "is_write_by_mask",
    "norm_with_torchs_variance",
    "write_where_",
]
