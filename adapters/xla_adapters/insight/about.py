"""`about`: what is trained, on what, by which versions."""

from __future__ import annotations

from datetime import datetime
from importlib.metadata import version

import torch

from xla_adapters.runtime import get_runtime


def about(model: torch.nn.Module | None, trainer: str) -> dict[str, str]:
    """What a training is, for its report.

    Args:
        model: what is trained; None if it does not exist yet.
        trainer: the name of what trains it.
    """
    runtime = get_runtime()
    device = runtime.device
    kind = device.kind() or device.hardware()
    parameters = sum(parameter.numel() for parameter in model.parameters()) if model is not None else 0
    return {
        "model": type(model).__name__ if model is not None else "a model",
        "parameters": f"{parameters:,}",
        "trained by": trainer,
        "device": f"{device.count()} x {kind}" + (", SPMD" if device.is_spmd() else ""),
        "started": datetime.now().astimezone().isoformat(timespec="seconds"),
        "versions": ", ".join(f"{name} {version(name)}" for name in ("xla-adapters", "torch", runtime.name)),
    }
