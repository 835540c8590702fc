"""How code behaves towards `torch.compile` while a step is traced."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def as_if_compiling(enabled: bool = True) -> Iterator[None]:
    """Inside the context, models take the code path they take under `torch.compile`, which reads no tensor values.

    In eager mode transformers reads masks and positions to find shortcuts (`find_packed_sequence_indices` of
    `masking_utils`, `padding_mask.all()`): one read per forward.

    Args:
        enabled: False cancels an enclosing context (optimizers compute in another order when compiling).
    """
    compiler: object = torch.compiler
    previous = torch.compiler._is_compiling_flag
    try:
        compiler._is_compiling_flag = enabled  # type: ignore[attr-defined]
        yield
    finally:
        compiler._is_compiling_flag = previous  # type: ignore[attr-defined]


@contextmanager
def compiled_code_inlined() -> Iterator[None]:
    """Inside the context, what `torch.compile` has compiled runs as if it had not been.

    The graph of a step holds it all; another compiler in the middle of it would need values that are not computed yet.
    """
    if "torch._dynamo" not in sys.modules:
        # Nothing is compiled yet, and the import takes seconds.
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


@contextmanager
def as_in_one_graph() -> Iterator[None]:
    """Around a traced step: code behaves as under `torch.compile`, without a second compiler inside the graph."""
    with as_if_compiling(), compiled_code_inlined():
        yield
