"""`kernel_replaced`: another kernel in torch's dispatcher for a while."""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.library import Library, get_kernel

_KEY = "XLA"


@contextmanager
def kernel_replaced(name: str, kernel: Callable[..., torch.Tensor]) -> Iterator[None]:
    """See `CustomKernels.replaced`."""
    if f"aten/{name}/{_KEY}" in torch.library._impls:
        yield
        return
    computed = functools.partial(_computed, kernel, _stock_kernel(name), threading.get_ident())
    library = Library("aten", "IMPL")
    try:
        library.impl(name, computed, _KEY, with_keyset=True)
        yield
    finally:
        library._destroy()


def _computed(kernel: Callable[..., Any], stock: Any, thread: int, keys: Any, *args: Any, **kwargs: Any) -> Any:
    before = functools.partial(stock.call_boxed, keys)
    # The dispatcher has one kernel for all threads.
    return kernel(before, *args, **kwargs) if threading.get_ident() == thread else before(*args, **kwargs)


@functools.cache
def _stock_kernel(name: str) -> Any:
    stock = get_kernel(f"aten::{name}", _KEY)
    library = Library("aten", "IMPL")
    with warnings.catch_warnings():
        # torch says once in a process that some kernel is being replaced, which is what is asked for.
        warnings.filterwarnings("ignore", "(?s).*verriding a previously registered kernel", UserWarning)
        library.impl(name, stock.call_boxed, _KEY, with_keyset=True)
    library._destroy()
    return stock
