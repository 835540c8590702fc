"""`FabricUpdates`: clipping and optimizer steps of a Fabric loop, inside and outside of steps."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch.optim import Optimizer

from lightning_strategy.fabric.steps import FabricSteps
from xla_adapters import in_step
from xla_adapters.tracing.optimizers import eager_reason
from xla_adapters.utils.torch_modes import as_if_compiling

# From `_warn` to the user's line: the method here, the strategy's hook and Fabric's own method lie between.
_USERS_LINE = 5


class FabricUpdates:
    """Runs `optimizer.step()` and gradient clipping: a part of the step, or a graph of their own.

    Under dynamo a loop without steps has three graphs: the model's forward and backward are dynamo's.

    Args:
        steps: of the strategy.
    """

    def __init__(self, steps: FabricSteps) -> None:
        self._steps = steps
        self._config = steps.config
        self._warned: set[str] = set()

    def step(self, optimizer: Any, run: Callable[..., Any], options: dict[str, Any]) -> Any:
        """Runs `optimizer.step()`; warns if it is outside of a step.

        Args:
            optimizer: Lightning's, or torch's.
            run: the parent class's method.
            options: its keyword arguments, a closure among them or not.
        """
        closure = options.get("closure")
        if closure is not None:
            options["closure"] = as_if_compiling()(closure)
        if self._config.xla_mode == "eager+compile" and not in_step():
            self._warn(
                "optimizer.step() was called outside of a step: each of its operations is executed singly, which is "
                "slow. Put forward, backward and update into `with fabric.strategy.step():`"
            )
            return run(optimizer, **options)
        if closure is not None and self._has_own_graph(optimizer):
            # The model's graphs are dynamo's. Only the update is one of ours.
            options["closure"] = functools.partial(_given, options["closure"]())
        with self.graph("optimizer_step", optimizer), as_if_compiling(False):
            return run(optimizer, **options)

    def may_raise_nonfinite(self, asked: bool) -> bool:
        """Whether clipping may raise on a norm that is not finite: never in a step. Warns if it was asked for.

        Args:
            asked: `error_if_nonfinite` of the user's call.
        """
        if asked and in_step():
            self._warn(
                "fabric.clip_gradients(max_norm=...) inside a step cannot raise on a norm that is not finite: it would "
                "read the norm before the step is executed. Say error_if_nonfinite=False, and look at the norm it "
                "returns behind the step if you want to know"
            )
            return False
        return asked

    def graph(self, name: str, optimizer: Optimizer | None = None) -> AbstractContextManager[None]:
        """Around clipping, or around an optimizer's update: a graph of its own outside of steps under dynamo.

        Args:
            name: of the graph, for messages.
            optimizer: that updates; None for clipping.
        """
        return self._steps.own_graph(name) if self._has_own_graph(optimizer) else nullcontext()

    def _has_own_graph(self, optimizer: Optimizer | None) -> bool:
        dynamo = self._config.xla_mode == "eager+dynamo" and not in_step()
        return dynamo and (optimizer is None or eager_reason(optimizer) is None)

    def _warn(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            warnings.warn(text, stacklevel=_USERS_LINE)


def _given(value: Any) -> Any:
    return value
