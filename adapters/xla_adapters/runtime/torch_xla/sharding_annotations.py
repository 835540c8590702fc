"""Sharding annotations as torch_xla keeps them."""

from __future__ import annotations

from typing import Any

import torch
import torch_xla

from xla_adapters.runtime.tile_assignment import TileAssignment, op_sharding_arguments, tiles_from_text

_C = torch_xla._XLAC


def tiles_of(tensor: torch.Tensor) -> TileAssignment | None:
    """How a tensor is cut; None if it is not annotated, or if every device holds it whole."""
    return tiles_from_text(_C._get_xla_sharding_spec(tensor.detach()), tensor.ndim)


def op_sharding(tiles: TileAssignment) -> Any:
    """The annotation as torch_xla's `OpSharding`."""
    return _C.OpSharding(*op_sharding_arguments(tiles))
