"""Buffers of their own for tensors that share one: an executable takes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from xla_adapters.backend import Backend


def give_own_buffers(tensors: Sequence[torch.Tensor], backend: Backend) -> None:
    """Copies what tensors hold, whose buffers others share."""
    backend.write(tensors, backend.copies(tensors))


def copies_of_taken(
    taken: Sequence[torch.Tensor], inputs: Mapping[int, torch.Tensor], backend: Backend
) -> dict[int, torch.Tensor]:
    """Copies of those inputs that are the same value as one whose buffer the executable takes."""
    found = backend.aliases(list(inputs.values()), taken)
    if not found:
        return {}
    keys = list(inputs)
    copies = backend.copies([inputs[keys[position]] for position in found])
    return {keys[position]: copy for position, copy in zip(found, copies, strict=True)}
