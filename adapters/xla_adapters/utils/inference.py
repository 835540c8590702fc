"""Lets code under `torch.inference_mode()` compute on XLA devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from xla_adapters.utils.patching import replaced


@contextmanager
def inference_mode_as_no_grad() -> Iterator[None]:
    """Inside the context, `torch.inference_mode()` only disables gradients, as `torch.no_grad()`.

    torch_xla cannot compute with inference tensors (`Cannot set version_counter for inference tensor`).
    """
    with replaced(torch.inference_mode, "__enter__", _without_gradients(torch.inference_mode.__enter__)):
        yield


def use_no_grad_for_inference_mode() -> None:
    """The same from now on, for the rest of the process: for a model that stays on the device after its training."""
    enter = torch.inference_mode.__enter__
    if not hasattr(enter, "of_xla_adapters"):
        torch.inference_mode.__enter__ = _without_gradients(enter)  # type: ignore[method-assign]


def _without_gradients(enter: Callable[[torch.inference_mode], None]) -> Callable[[torch.inference_mode], None]:
    def without_gradients(self: torch.inference_mode) -> None:
        if not self.mode:
            enter(self)
            return
        # The stock `__exit__` leaves what it finds there.
        self._inference_mode_context = torch.no_grad()  # type: ignore[assignment]
        self._inference_mode_context.__enter__()

    without_gradients.of_xla_adapters = True  # type: ignore[attr-defined]
    return without_gradients
