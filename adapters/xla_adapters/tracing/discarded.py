"""`DiscardedTensor`: the class that tensors made by a discarded step get."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from xla_adapters.errors import DiscardedTensorError
from xla_adapters.runtime import Runtime


class DiscardedTensor(torch.Tensor):
    """A tensor whose value was never computed, because its step was discarded. Any use raises.

    torch_xla itself would end the process when the value of such a tensor is read.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", str(func))
        raise DiscardedTensorError(
            f"{name}: this tensor was made in a step that was discarded (an exception, or Ctrl-C, ended it early), "
            "so it has no value. Use what the step made only after the step has ended normally."
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return "<tensor of a discarded step>"


def mark_discarded(runtime: Runtime, kept: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Makes every use of a tensor without a value an error; called before the pending graph is discarded.

    Args:
        runtime: the runtime.
        kept: tensors whose values will be restored, and with them those of the tensors that share their memory.

    Returns:
        The tensors that share memory with `kept`. To be updated once those have their values.
    """
    tensors = [tensor for tensor in runtime.tracing.live_tensors() if not isinstance(tensor, DiscardedTensor)]
    lazy = runtime.lazy if runtime.has_lazy_tensors else None
    with torch._C.DisableTorchFunction():
        storages = {_storage(tensor) for tensor in kept}
        sharing = [tensor for tensor in tensors if torch._is_functional_tensor(tensor) and _storage(tensor) in storages]
        # Their inner tensors may be among the live ones; they are replaced when the outer ones are updated.
        inner = [] if lazy is None else list(map(lazy.inner, sharing))
        left = set(map(id, inner))
        without_value = [
            tensor
            for tensor in tensors
            if id(tensor) not in left and runtime.tracing.is_pending(tensor) and _storage(tensor) not in storages
        ]
        # After all were asked: a kernel in Python has seen a tensor's inner one, and with that the outer gets a value.
        for tensor in without_value:
            if lazy is not None:
                lazy.give_any_value(tensor)
            tensor.__class__ = DiscardedTensor
    return sharing


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
