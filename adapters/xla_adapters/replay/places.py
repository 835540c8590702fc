"""`Place`: where a step's graph gets a tensor from, and where it puts one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import TreeSpec


@dataclass
class PassTensors:
    """The tensors that differ from pass to pass.

    Attributes:
        batch: on the device, only read by the step.
        extras: on the device, which the step may update in place; the same ones at the same positions each time.
    """

    batch: Sequence[torch.Tensor] = ()
    extras: Sequence[torch.Tensor] = ()


@dataclass(frozen=True, eq=False)
class Place:
    """Somewhere a tensor lies.

    Attributes:
        kind: `"tensor"` (the owner itself, whose value changes), `"grad"` (of the owner), `"buffer"` (of the
            owner, a module, which the step binds anew), `"bound"` (an attribute of the owner), `"state"` (an entry of
            the owner, an optimizer's state), `"packed"` (a row of the owner, a `PackedState`), `"gradients"` (a row of
            the owner, `PackedGradients`, which is written alone), `"batch"` or `"extra"` (at the position `name`).
        owner: the tensor, module, object or dictionary.
        name: of the buffer, attribute or entry, or the position.
    """

    kind: str
    owner: Any = None
    name: str | int = ""
    key: tuple[str, int, str | int] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", (self.kind, id(self.owner), self.name))

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor that lay there before a step still does, if the place may be given another one."""
        if self.kind == "grad":
            return self.owner.grad is tensor
        return self.kind != "bound" or vars(self.owner).get(self.name) is tensor

    def get(self, tensors: PassTensors) -> torch.Tensor:
        """The tensor that lies there now."""
        if self.kind == "tensor":
            found = self.owner
        elif self.kind == "grad":
            found = self.owner.grad
        elif self.kind == "buffer":
            found = self.owner._buffers[self.name]
        elif self.kind == "state":
            found = self.owner[self.name]
        elif self.kind == "bound":
            found = vars(self.owner)[self.name]
        elif self.kind == "packed":
            found = self.owner.row(self.name)
        else:
            found = (tensors.batch if self.kind == "batch" else tensors.extras)[int(self.name)]
        assert isinstance(found, torch.Tensor)
        return found


@dataclass(frozen=True)
class Kept:
    """A value that the step hands out: where its tensors come from.

    Attributes:
        spec: of the nesting.
        leaves: outputs by position, places, or plain values.
    """

    spec: TreeSpec
    leaves: tuple[int | Place | tuple[Any], ...]
