"""The part of the seam that has the device compute what no operation of torch's does.

Written against torch_xla 2.9's user computations.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch_xla

from xla_adapters.backend.block_graphs import make_room

if TYPE_CHECKING:
    from xla_adapters.backend.interface import Backend as _Rest
else:
    _Rest = object

_C = torch_xla._XLAC

# Computations that need not be read again.
_KEPT = 4096


class Computations(_Rest):
    """Computations of one's own; a part of `PJRTBackend`."""

    def __init__(self) -> None:
        super().__init__()
        self._called: dict[bytes, Any] = {}

    def call(self, computation: bytes, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """What a computation makes of these tensors, as part of the graph that is traced.

        Args:
            computation: an HloModuleProto.
            inputs: of the device, in the order of its parameters.
        """
        made = self._called.get(computation)
        if made is None:
            make_room(self._called, _KEPT)
            made = self._called[computation] = _C._xla_op_computation_from_module_proto("computation", computation)
        return list(_C._xla_user_computation("xla_adapters::computation", list(inputs), made))
