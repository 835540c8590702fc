"""Lets code that asks whether it is being compiled hear that it is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def as_if_compiling(enabled: bool = True) -> Iterator[None]:
    """Lets models take the path they take under `torch.compile`: the one that reads no tensor.

    In eager PyTorch transformers looks into masks and positions to find a shortcut
    (`masking_utils.find_packed_sequence_indices`, `padding_mask.all()`), one read per forward.

    Args:
        enabled: `False` undoes an enclosing one (for optimizers, which compute in another order then).
    """
    compiler: object = torch.compiler
    previous = torch.compiler._is_compiling_flag
    compiler._is_compiling_flag = enabled  # type: ignore[attr-defined]
    try:
        yield
    finally:
        compiler._is_compiling_flag = previous  # type: ignore[attr-defined]
