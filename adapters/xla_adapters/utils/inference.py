"""Lets code under `torch.inference_mode()` compute on XLA devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from weakref import WeakSet

import torch

from xla_adapters.utils.device_type import device_type
from xla_adapters.utils.patching import replaced


@contextmanager
def inference_mode_as_no_grad() -> Iterator[None]:
    """Inside the context, `torch.inference_mode()` only disables gradients, as `torch.no_grad()`.

    torch_xla cannot compute with inference tensors (`Cannot set version_counter for inference tensor`).
    """
    with replaced(torch.inference_mode, "__enter__", _without_gradients(torch.inference_mode.__enter__)):
        yield


# Models that were trained, and may be used outside a run.
_models: WeakSet[torch.nn.Module] = WeakSet()


def use_no_grad_for_inference_mode(model: torch.nn.Module) -> None:
    """The same from now on, as long as the model lives and is on an XLA device: it may be used after its training."""
    _models.add(model)
    enter = torch.inference_mode.__enter__
    if not hasattr(enter, "of_xla_adapters"):
        torch.inference_mode.__enter__ = _without_gradients(enter, _some_model_is_on_device)  # type: ignore[method-assign]


def _some_model_is_on_device() -> bool:
    firsts = (next(model.parameters(), None) for model in _models)
    return any(first is not None and first.device.type == device_type() for first in firsts)


def _without_gradients(
    enter: Callable[[torch.inference_mode], None], applies: Callable[[], bool] = lambda: True
) -> Callable[[torch.inference_mode], None]:
    def without_gradients(self: torch.inference_mode) -> None:
        if not self.mode or not applies():
            enter(self)
            return
        # The stock `__exit__` leaves what it finds there.
        self._inference_mode_context = torch.no_grad()  # type: ignore[assignment]
        self._inference_mode_context.__enter__()

    without_gradients.of_xla_adapters = True  # type: ignore[attr-defined]
    return without_gradients
