"""`PromisedTensor`: what stands for a tensor that is not computed yet."""

from __future__ import annotations

from typing import Any

import torch

from xla_adapters.errors import TensorReadError


class PromisedTensor(torch.Tensor):
    """A tensor that a replayed step hands out before it has computed it. Any use until then raises."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", str(func))
        raise TensorReadError(
            f"{name}: the step that computes this tensor has not ended yet, or failed. Use it behind the step, or set "
            "step_replay=False to have it traced at each pass."
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return "<tensor of a step that has not ended>"
