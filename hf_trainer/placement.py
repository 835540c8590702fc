"""The model as it lies on the device when training begins."""

from __future__ import annotations

import torch

from xla_adapters import get_backend


def own_scalars(model: torch.nn.Module) -> None:
    """Gives scalar parameters (CLIP's temperature) and buffers a device buffer of their own.

    `model.to("xla")` lets equal scalars share one, which is then never reused for the updated value:
    the first step would be another graph than the later ones. Costs one transfer per scalar.
    """
    backend = get_backend()
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.ndim == 0 and tensor.device == backend.device():
                tensor.data = backend.to_device(*backend.to_host([tensor]))
