"""`TensorFacts`: what a trace depends on in a parameter or buffer beside its values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from xla_adapters.replay.values import copied, differs, is_noted


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """Mode, shape, hooks and attributes of a tensor.

    Attributes:
        tensor: whose they are.
        requires_grad, shape, dtype: as they were.
        attributes: what Python code has set on it.
        hooks: on its gradient, by their numbers.
    """

    tensor: torch.Tensor
    requires_grad: bool
    shape: torch.Size
    dtype: torch.dtype
    attributes: dict[str, Any]
    hooks: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorFacts:
        """Notes them as they are."""
        keys = tuple(key for hooks in hooks_of(tensor) for key in hooks)
        return cls(tensor, tensor.requires_grad, tensor.shape, tensor.dtype, _attributes(tensor), keys)

    def changed(self) -> str | None:
        """What is another now, or None."""
        tensor = self.tensor
        if tensor.requires_grad is not self.requires_grad:
            return f"requires_grad ({self.requires_grad} -> {tensor.requires_grad})"
        if tensor.dtype is not self.dtype or tensor.shape != self.shape:
            return "the shape or dtype"
        hooks = hooks_of(tensor)
        if (hooks or self.hooks) and tuple(key for group in hooks for key in group) != self.hooks:
            return "a hook"
        if tensor.__dict__ or self.attributes:
            present = _attributes(tensor)
            if present.keys() != self.attributes.keys() or any(
                differs(present[key], value) for key, value in self.attributes.items()
            ):
                return "an attribute"
        return None


def hooks_of(tensor: torch.Tensor) -> list[dict[int, Any]]:
    """The hooks on its gradient."""
    after = getattr(tensor, "_post_accumulate_grad_hooks", None)
    return [hooks for hooks in (tensor._backward_hooks, after) if hooks]


def _attributes(tensor: torch.Tensor) -> dict[str, Any]:
    return {key: copied(value) for key, value in vars(tensor).items() if is_noted(value)}
