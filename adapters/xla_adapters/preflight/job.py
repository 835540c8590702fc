"""`StepJob`: what the tracing process is given: a model without weights, its batch, plan and optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from xla_adapters.sharding import ShardingPlan
from xla_adapters.sharding.measure import Job
from xla_adapters.utils.torch_modes import device_type

MakeOptimizer = Callable[[Sequence[torch.nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True, kw_only=True)
class StepJob(Job):
    """One training step to be traced.

    Attributes:
        optimizer: makes the optimizer of the parameters that are trained.
    """

    optimizer: MakeOptimizer

    def empty(self, value: Any) -> Any:
        """A leaf of the batch as it is sent: its shape."""
        return torch.empty_like(value, device="meta") if isinstance(value, torch.Tensor) else value

    @property
    def plan(self) -> ShardingPlan:
        """How the step is sharded."""
        return self.plans[0]


@dataclass(frozen=True)
class InBfloat16:
    """A context for the forward pass with autocast to bfloat16, as `bf16=True` of a Trainer.

    Args:
        around: returns a further context.
    """

    around: Callable[[], AbstractContextManager[Any]]

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """The context."""
        with self.around(), torch.autocast(device_type(), dtype=torch.bfloat16):
            yield


def adamw(parameters: Sequence[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """torch's AdamW."""
    return torch.optim.AdamW(parameters, lr=1e-4, weight_decay=0.1)


def adam(parameters: Sequence[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """torch's Adam."""
    return torch.optim.Adam(parameters, lr=1e-4)


def sgd(parameters: Sequence[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """torch's SGD with momentum."""
    return torch.optim.SGD(parameters, lr=1e-4, momentum=0.9)


# The figures of a step do not depend on the values of an optimizer's options.
OPTIMIZERS: dict[str, MakeOptimizer] = {"adamw": adamw, "adam": adam, "sgd": sgd}
