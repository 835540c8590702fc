"""Moving a module to or from the XLA device: torch makes new parameters there, and others refer to the former ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from lightning.pytorch.utilities import find_shared_parameters, set_shared_parameters
from torch.optim import Optimizer


@contextmanager
def keeping_ties(model: torch.nn.Module | None) -> Iterator[None]:
    """Parameters that are one before the body moves the model are one after it (tied weights)."""
    shared = find_shared_parameters(model) if model is not None else []
    yield
    if model is not None:
        set_shared_parameters(model, shared)


@contextmanager
def optimizers_following(model: torch.nn.Module | None, optimizers: Iterable[Optimizer]) -> Iterator[None]:
    """Optimizers refer to the parameters that the model has after the body has moved it, and free the former ones."""
    former = {} if model is None else dict(model.named_parameters(remove_duplicate=False))
    yield
    if model is None:
        return
    now = dict(model.named_parameters(remove_duplicate=False))
    successors: dict[torch.Tensor, torch.Tensor] = {former[name]: now[name] for name in former if name in now}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"][:] = [successors.get(parameter, parameter) for parameter in group["params"]]
        states = list(optimizer.state.items())
        optimizer.state.clear()
        optimizer.state.update({successors.get(parameter, parameter): state for parameter, state in states})


@contextmanager
def keeping_parameters() -> Iterator[None]:
    """Parameters stay the same objects while the body moves a module: torch swaps the new contents into them."""
    options: Any = torch.__future__
    with ExitStack() as stack:
        stack.callback(options.set_swap_module_params_on_conversion, options.get_swap_module_params_on_conversion())
        options.set_swap_module_params_on_conversion(True)
        yield
