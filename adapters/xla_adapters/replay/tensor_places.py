"""`TensorPlace`: where a tensor is stored that a step's graph reads or writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import torch
from torch.utils._pytree import TreeSpec


class CannotReplay(Exception):
    """A call cannot be captured, or is not a replay of an earlier one. Internal; the message is shown as a reason."""


@dataclass
class CallTensors:
    """The tensors that one call of a step is given.

    Attributes:
        batch: on the device, only read by the step.
        extras: on the device, which the step may update in place; the same ones at the same positions each time.
    """

    batch: Sequence[torch.Tensor] = ()
    extras: Sequence[torch.Tensor] = ()


@dataclass(frozen=True, eq=False)
class TensorPlace:
    """The location of a tensor.

    Attributes:
        kind: `"tensor"` (the owner itself), `"grad"` (of the owner), `"buffer"` (of the owner, a module; the step
            assigns another tensor to it), `"attribute"` (of the owner), `"state"` (an entry of the owner, which is the
            state of an optimizer), `"batch"` or `"extra"` (at the position `name`).
        owner: the tensor, module, object or dictionary.
        name: of the buffer, attribute or entry, or the position.
        key: equal for two places of the same location.
    """

    kind: str
    owner: Any = None
    name: str | int = ""
    key: tuple[str, int, str | int] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", (self.kind, id(self.owner), self.name))

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor that was stored here before a step still is, for places that can get another tensor."""
        if self.kind == "grad":
            return self.owner.grad is tensor
        return self.kind != "attribute" or vars(self.owner).get(self.name) is tensor

    def get(self, tensors: CallTensors) -> torch.Tensor:
        """The tensor that is stored here now.

        Args:
            tensors: of the present call, for places in the batch and the extras.
        """
        if self.kind == "tensor":
            found = self.owner
        elif self.kind == "grad":
            found = self.owner.grad
        elif self.kind == "buffer":
            found = self.owner._buffers[self.name]
        elif self.kind == "state":
            found = self.owner[self.name]
        elif self.kind == "attribute":
            found = vars(self.owner)[self.name]
        else:
            found = (tensors.batch if self.kind == "batch" else tensors.extras)[int(self.name)]
        assert isinstance(found, torch.Tensor)
        return found


def is_state(source: object) -> TypeGuard[TensorPlace]:
    """Whether this is the location of a tensor that stays the same object: a parameter, say."""
    return isinstance(source, TensorPlace) and source.kind == "tensor"


@dataclass(frozen=True)
class Computed:
    """A number that the step returns, and how it is computed of those that are read in the step."""

    expression: tuple[Any, ...]


@dataclass(frozen=True)
class Returned:
    """Where a value comes from that the step returns.

    Attributes:
        spec: the structure of nested containers.
        leaves: for each leaf the position of an output, a place to read, a number that is read, or a tuple of one
            constant.
    """

    spec: TreeSpec
    leaves: tuple[int | TensorPlace | Computed | tuple[Any], ...]
