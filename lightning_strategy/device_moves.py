"""Moving a module to or from the XLA device: torch makes new parameters there, and others refer to the former ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from lightning.pytorch.utilities import find_shared_parameters, set_shared_parameters


@contextmanager
def keeping_ties(model: torch.nn.Module | None) -> Iterator[None]:
    """Parameters that are one before the body moves the model are one after it (tied weights)."""
    shared = find_shared_parameters(model) if model is not None else []
    yield
    if model is not None:
        set_shared_parameters(model, shared)


@contextmanager
def keeping_parameters() -> Iterator[None]:
    """Parameters stay the same objects while the body moves a module: torch swaps the new contents into them."""
    options: Any = torch.__future__
    with ExitStack() as stack:
        stack.callback(options.set_swap_module_params_on_conversion, options.get_swap_module_params_on_conversion())
        options.set_swap_module_params_on_conversion(True)
        yield
