"""What is left in the user's hands of a step that was discarded."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from xla_adapters.backend import Backend
from xla_adapters.errors import DiscardedTensorError


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


def mark_discarded(backend: Backend, kept: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Makes every use of a tensor without a value an error; called before the pending graph is discarded.

    Args:
        backend: the seam.
        kept: tensors that will get a value again; what shares memory with them will, too.

    Returns:
        All that share memory with them: to be brought up to date once they have their value.
    """
    tensors = [tensor for tensor in backend.live_tensors() if not isinstance(tensor, DiscardedTensor)]
    with torch._C.DisableTorchFunction():
        storages = {_storage(tensor) for tensor in kept}
        sharing = [tensor for tensor in tensors if torch._is_functional_tensor(tensor) and _storage(tensor) in storages]
        # What is behind those is met too if it was ever looked at, and goes when they are brought up to date.
        behind = list(map(backend.inner, sharing))
        left = set(map(id, behind))
        for tensor in tensors:
            if id(tensor) not in left and backend.is_pending(tensor) and _storage(tensor) not in storages:
                backend.give_any_value(tensor)
                tensor.__class__ = DiscardedTensor
    return sharing


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
