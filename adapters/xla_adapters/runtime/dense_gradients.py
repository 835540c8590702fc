"""`warn_of_dense_gradients`: of embeddings with `sparse=True`."""

from __future__ import annotations

import functools
import warnings

from xla_adapters.errors import DenseGradientWarning


@functools.cache
def warn_of_dense_gradients() -> None:
    """Warns once in a process that an embedding with `sparse=True` has dense gradients."""
    warnings.warn(
        "an embedding with sparse=True: its gradients are dense on XLA devices, which have no sparse tensors. SGD "
        "computes the same; sparse=False says what happens",
        DenseGradientWarning,
        stacklevel=2,
    )
