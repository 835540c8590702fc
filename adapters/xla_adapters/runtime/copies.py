"""`copies_told`: who is told of the copies to the host that `Transfers.to_host` makes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

_listeners: list[Callable[[Sequence[torch.Tensor]], None]] = []


@contextmanager
def copies_told(listener: Callable[[Sequence[torch.Tensor]], None]) -> Iterator[None]:
    """Until the exit, a function is called with the tensors of each copy to the host."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def tell_copy(tensors: Sequence[torch.Tensor]) -> None:
    """Tensors of the device are copied to the host, all at once."""
    for listener in _listeners:
        listener(tensors)
