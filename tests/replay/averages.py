"""Weights that a callback keeps beside those that are trained, and puts back in all the ways that users do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import xla_adapters

WAYS = ("copy_", "swap", "clones", "load_state_dict", "best", "AveragedModel")
# The batch after which the weights are put back; one is there before and one behind an evaluation.
PUT_BACK = (2, 5)


class Averages:
    """An average of a model's weights, and a copy of those of an earlier step.

    Args:
        model: that is trained.
        way: how the weights are put back, of `WAYS`; nothing is put back if it is empty.
    """

    def __init__(self, model: nn.Module, way: str) -> None:
        self.model = model
        self.way = way
        self.average = [parameter.detach().clone() for parameter in model.parameters()]
        self.averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.8)) if way == "AveragedModel" else None
        self.best: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def batch_ended(self, number: int) -> None:
        """To be called after each batch, the first of which is 0."""
        weights = list(self.model.parameters())
        for mean, weight in zip(self.average, weights, strict=True):
            mean.mul_(0.9).add_(weight.detach(), alpha=0.1)
        if self.averaged is not None:
            self.averaged.update_parameters(self.model)
        if number == 1 and self.way:
            self.best = {name: value.clone() for name, value in self.model.state_dict().items()}
        if number in PUT_BACK and self.way:
            self._put_back(weights)

    def _put_back(self, weights: list[nn.Parameter]) -> None:
        if self.way == "best":
            for name, parameter in self.model.named_parameters():
                parameter.data = self.best[name].clone()
        elif self.way == "load_state_dict":
            self.model.load_state_dict({name: value.clone() for name, value in self.best.items()})
        elif self.averaged is not None:
            self.model.load_state_dict(self.averaged.module.state_dict())
        for mean, weight in zip(self.average, weights, strict=True):
            if self.way == "copy_":
                weight.copy_(mean)
            elif self.way == "swap":
                weight.data, mean.data = mean.data, weight.data
            elif self.way == "clones":
                weight.data = mean.clone()

    def values(self) -> list[float]:
        """All that is held, on the host."""
        averaged = [] if self.averaged is None else list(self.averaged.parameters())
        held = [*self.model.parameters(), *self.average, *self.best.values(), *averaged]
        return [float(value) for tensor in held for value in tensor.detach().cpu().flatten()]


@contextmanager
def counting_looks() -> Iterator[dict[str, Any]]:
    """Counts how often inside all live tensors are looked at, the state is, and tensors are given buffers."""
    runtime = xla_adapters.get_runtime()
    with (
        mock.patch.object(runtime.shared_buffers, "_separate_all", wraps=runtime.shared_buffers._separate_all) as first,
        mock.patch.object(
            runtime.shared_buffers, "give_own_buffers", wraps=runtime.shared_buffers.give_own_buffers
        ) as live,
        mock.patch.object(runtime.shared_buffers, "may_share", wraps=runtime.shared_buffers.may_share) as state,
        mock.patch.object(runtime.values, "copies", wraps=runtime.values.copies) as copies,
        mock.patch.object(runtime.tracing, "live_tensors", wraps=runtime.tracing.live_tensors) as every,
    ):
        yield {"first": first, "live": live, "state": state, "copies": copies, "every": every}
