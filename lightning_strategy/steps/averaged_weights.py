"""Averaged weights (`WeightAveraging`, `EMAWeightAveraging`): each update of an average is one graph."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch.optim.swa_utils import AveragedModel

import xla_adapters
from xla_adapters import XLAConfig, get_runtime, in_step
from xla_adapters.runtime.transfers import to_host_in_one_transfer, uploading
from xla_adapters.utils.patching import replaced


class _HostWeights:
    """Copies of a module's parameters and buffers on the host, with the interface that `AveragedModel` reads."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._values = to_host_in_one_transfer([list(model.parameters()), list(model.buffers())])

    def parameters(self) -> Iterator[torch.Tensor]:
        return iter(self._values[0])

    def buffers(self) -> Iterator[torch.Tensor]:
        return iter(self._values[1])


@contextmanager
def averaging_in_one_graph(config: XLAConfig) -> Iterator[None]:
    """Until the exit, each update of a `torch.optim.swa_utils.AveragedModel` on the device is a step.

    Args:
        config: the options of the run.
    """
    stock: Callable[[Any, Any], None] = AveragedModel.update_parameters

    # The update has no gradients, its graph is not limited, and its Python runs each time.
    config = replace(config.without_graph_limits(), free_grads=False, step_replay=False)

    @functools.wraps(stock)
    def update_parameters(self: Any, model: torch.nn.Module) -> None:
        runtime = get_runtime()
        if in_step() or not all(runtime.device.owns(value) for value in self.module.parameters()):
            stock(self, model)
            return
        # `AveragedModel` reads this count at each update: on the host that costs no transfer.
        self.n_averaged = to_host_in_one_transfer(self.n_averaged)
        if self.n_averaged == 0:
            # The first update copies the weights. A copy on the device would share the weight's buffer, which the
            # next step could not reuse then.
            with uploading():
                stock(self, _HostWeights(model))
            runtime.tracing.flush()
            return
        with xla_adapters.step(name="averaged_weights", config=config):
            stock(self, model)

    if not config.compiles_step:
        yield
        return
    with replaced(AveragedModel, "update_parameters", update_parameters):
        yield
