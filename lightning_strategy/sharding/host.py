"""Moving sharded tensors to the host."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch.loops.prediction_loop
import torch
from torch.optim import Optimizer

from lightning_strategy.checkpoints.host_copy import on_host
from xla_adapters.runtime.transfers import to_host_in_one_transfer
from xla_adapters.utils.patching import replaced


def bring_to_host(module: torch.nn.Module | None, optimizers: list[Optimizer]) -> None:
    """Moves a sharded module and its optimizers' states to the host, in one transfer each.

    `module.cpu()` would compile a graph for each tensor.
    """
    if module is not None:
        tensors = [*module.parameters(), *module.buffers()]
        tensors += [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
        copies = dict(zip(map(id, tensors), to_host_in_one_transfer(tensors), strict=True))
        module._apply(lambda tensor: copies[id(tensor)] if id(tensor) in copies else tensor.cpu())
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            optimizer.state[parameter] = to_host_in_one_transfer(state)


@contextmanager
def predictions_in_one_transfer() -> Iterator[None]:
    """Until the exit, the Trainer moves predictions to the host without compiling a graph for each sharded tensor."""
    loop: Any = lightning.pytorch.loops.prediction_loop
    stock: Callable[[Any, Any], Any] = loop.move_data_to_device

    @functools.wraps(stock)
    def move_data_to_device(batch: Any, device: Any) -> Any:
        if torch.device(device).type == "cpu":
            batch = on_host({"predictions": batch})["predictions"]
        return stock(batch, device)

    with replaced(loop, "move_data_to_device", move_data_to_device):
        yield
