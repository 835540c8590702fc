"""`PendingOutput`: the class of tensors that a replayed call returns, until they are computed."""

from __future__ import annotations

from typing import Any

import torch

from xla_adapters.errors import TensorReadError


class PendingOutput(torch.Tensor):
    """A tensor that a replayed call returns before it is computed. Any use until then raises."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", str(func))
        raise TensorReadError(
            f"{name}: the step that computes this tensor has not ended yet, or failed. Use it after the step, or set "
            "step_replay=False to have the step traced at each call."
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return "<tensor of a step that has not ended>"
