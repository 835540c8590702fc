"""`Number`: an input of a step's graph that began as a Python number."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from xla_adapters.replay.errors import CannotReplay


@dataclass
class Number:
    """An input that began as a Python number.

    Attributes:
        value: on the device.
        of_update: whether it came into the graph with an optimizer's update.
        roles: the numbers of the optimizer that it may be, by position.
        constant: whether it may be something else too, that does not change.
        present: the value it has on the host.
    """

    value: torch.Tensor
    of_update: bool = False
    roles: tuple[int, ...] = ()
    constant: bool = True
    present: float = 0.0

    def next(self, numbers: Sequence[float]) -> float:
        """Its value in the pass to come, given the optimizer's numbers."""
        dtype = self.value.dtype
        values = {cast(numbers[role], dtype) for role in self.roles}
        if self.constant:
            values.add(self.present)
        if len(values) != 1:
            raise CannotReplay("two numbers of the step were equal, shared an input of its graph, and are not any more")
        return values.pop()


def cast(value: float, dtype: torch.dtype) -> float:
    """A number as it is in a tensor of this type."""
    # The first is what nearly all are, and a twentieth of what a tensor costs.
    return ctypes.c_float(value).value if dtype == torch.float32 else float(torch.tensor(value, dtype=dtype))
