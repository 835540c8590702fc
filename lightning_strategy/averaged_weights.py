"""Averages of weights (`WeightAveraging`, `EMAWeightAveraging`): each update is one graph."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch.optim.swa_utils import AveragedModel

import xla_adapters
from xla_adapters import XLAConfig, get_backend, in_step
from xla_adapters.patching import replaced
from xla_adapters.transfers import to_host_in_one_transfer, uploading


class _Copies:
    """A module's weights on the host."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._values = to_host_in_one_transfer([list(model.parameters()), list(model.buffers())])

    def parameters(self) -> Iterator[torch.Tensor]:
        return iter(self._values[0])

    def buffers(self) -> Iterator[torch.Tensor]:
        return iter(self._values[1])


@contextmanager
def averaging_in_one_graph(config: XLAConfig) -> Iterator[None]:
    """Makes each update of a `torch.optim.swa_utils.AveragedModel` on the device a step, until the exit."""
    stock: Callable[[Any, Any], None] = AveragedModel.update_parameters

    # It has no gradients to free, its graph is none of the training's, and its Python runs at each update. Steps that
    # wait to be executed together are executed when it begins.
    config = replace(config, free_grads=False, max_graphs=None, step_replay=False, steps_per_execution=1)

    @functools.wraps(stock)
    def update_parameters(self: Any, model: torch.nn.Module) -> None:
        backend = get_backend()
        if in_step() or not all(backend.is_backend_tensor(value) for value in self.module.parameters()):
            stock(self, model)
            return
        # Asked for at each update: how many there have been.
        self.n_averaged = to_host_in_one_transfer(self.n_averaged)
        if self.n_averaged == 0:
            # On the device a copy would share its buffer with the weight, which the next step could not reuse.
            with uploading():
                stock(self, _Copies(model))
            backend.flush()
            return
        with xla_adapters.step(name="averaged_weights", config=config):
            stock(self, model)

    if not config.compiles_step:
        yield
        return
    with replaced(AveragedModel, "update_parameters", update_parameters):
        yield
