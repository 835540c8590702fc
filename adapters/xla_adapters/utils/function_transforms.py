"""Tensors inside the transforms of `torch.func` (`grad`, `vmap`, `jvp`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch._C import _functorch
from torch._functorch import eager_transforms, vmap

from xla_adapters.utils.patching import replaced

# What ends a transform: each takes a wrapped tensor first, and returns the one in it, or a view of that.
_ENDS = ((vmap, "_remove_batch_dim"), (eager_transforms, "_unwrap_for_grad"))


# Whether a transform is under way.
in_transform: Callable[[], bool] = torch._C._are_functorch_transforms_active


def unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that transforms have wrapped, which has a memory; any other one is returned as it is."""
    while _functorch.is_functorch_wrapped_tensor(tensor):
        tensor = _functorch.get_unwrapped(tensor)
    return tensor


@contextmanager
def results_of_transforms(notify: Callable[[Any], None]) -> Iterator[None]:
    """Calls `notify` with each result of a transform: no function mode sees how these are made."""

    def notifying(end: Callable[..., Any]) -> Callable[..., Any]:
        def ended(*args: Any) -> Any:
            result = end(*args)
            notify(result)
            return result

        return ended

    with ExitStack() as stack:
        for owner, name in _ENDS:
            stack.enter_context(replaced(owner, name, notifying(getattr(owner, name))))
        yield
