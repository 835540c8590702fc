"""The trainer's model on the device."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers

from hf_trainer.optimizers import follow_moved_parameters
from xla_adapters import get_runtime


class ParameterMoves:
    """The parameters that were replaced when a model was moved to the device.

    torch does so if the two devices have different kinds of tensors. An optimizer made before has the old ones.
    """

    def __init__(self) -> None:
        # Old and new ones. Weak references, so that the host's copy of a model without optimizer is freed.
        self._moved: list[tuple[weakref.ref[torch.nn.Parameter], weakref.ref[torch.nn.Parameter]]] = []

    @contextmanager
    def noting(self, model: torch.nn.Module) -> Iterator[None]:
        """Around the move of a model."""
        before = [(name, weakref.ref(value)) for name, value in model.named_parameters(remove_duplicate=False)]
        yield
        after = dict(model.named_parameters(remove_duplicate=False))
        self._moved += [(old, weakref.ref(after[name])) for name, old in before if name in after and old() is not None]

    def follow(self, optimizer: Any) -> None:
        """Lets an optimizer update the moved parameters. The moves so far are forgotten."""
        pairs = [(old(), new()) for old, new in self._moved]
        moved = {old: new for old, new in pairs if old is not None and new is not None and old is not new}
        self._moved.clear()
        if moved and isinstance(optimizer, torch.optim.Optimizer):
            follow_moved_parameters(optimizer, moved)


def model_of(trainer: transformers.Trainer) -> torch.nn.Module:
    """The model of a constructed trainer."""
    model = trainer.model
    assert isinstance(model, torch.nn.Module)
    return model


def own_scalars(model: torch.nn.Module) -> None:
    """Gives each scalar parameter (CLIP's temperature) and scalar buffer a device buffer that it does not share.

    `model.to("xla")` lets equal scalars share one buffer, which is then never donated to the updated value:
    the first step would be another graph than the later ones. Costs one transfer per scalar.

    Args:
        model: on the device; changed in place.
    """
    runtime = get_runtime()
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.ndim == 0 and tensor.device == runtime.device.torch_device():
                tensor.data = runtime.transfers.to_device(*runtime.transfers.to_host([tensor]))
