"""The part of the seam that has torch's dispatcher compute an operation on the device otherwise, for a while."""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.library import Library, get_kernel

if TYPE_CHECKING:
    from xla_adapters.backend.interface import Backend as _Rest
else:
    _Rest = object

_KEY = "XLA"


class Kernels(_Rest):
    """Kernels of one's own; a part of `PJRTBackend`."""

    @contextmanager
    def kernel_replaced(self, name: str, kernel: Callable[..., torch.Tensor]) -> Iterator[None]:
        """Has another kernel compute an operation of aten's, whoever calls it: autograd in C++, too.

        In this thread; others compute as before. Where the user has a kernel of their own, that one stays.

        Args:
            name: of the operation, with its overload.
            kernel: gets a function that computes as before, and what the operation is called with.
        """
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
