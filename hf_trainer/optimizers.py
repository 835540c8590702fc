"""What the core must know of the optimizers transformers brings along."""

from __future__ import annotations

from typing import Any

import torch
from transformers.optimization import Adafactor

from xla_adapters import register_eager_optimizer, register_state_init


def _adafactor_state(optimizer: Any, group: dict[str, Any], parameter: torch.Tensor) -> dict[str, Any]:
    """As `transformers.optimization.Adafactor.step` begins (5.23)."""
    factored, first_moment = optimizer._get_options(group, parameter.shape)
    dtype = torch.float32 if parameter.dtype in (torch.float16, torch.bfloat16) else parameter.dtype

    def zeros(shape: torch.Size) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype).to(parameter.device)

    state: dict[str, Any] = {"step": 0}
    shape = parameter.shape
    if first_moment:
        state["exp_avg"] = zeros(shape)
    if factored:
        state["exp_avg_sq_row"] = zeros(shape[:-1])
        state["exp_avg_sq_col"] = zeros(shape[:-2] + shape[-1:])
    else:
        state["exp_avg_sq"] = zeros(shape)
    # The update sets it before it reads it; a number there would be another state than the later ones.
    state["RMS"] = zeros(torch.Size())
    return state


def register_transformers_optimizers() -> None:
    """Tells the core; called when this package is imported."""
    register_state_init(Adafactor, _adafactor_state)
    register_eager_optimizer(
        Adafactor,
        "scale_parameter=True compares the norm of every parameter on the host",
        when=lambda optimizer: any(group["scale_parameter"] for group in optimizer.param_groups),
    )
