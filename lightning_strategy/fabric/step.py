"""`FabricStep`: one marked step of a Fabric loop."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from lightning_strategy.fabric.steps import FabricSteps, StepKind
from xla_adapters.errors import ConfigError
from xla_adapters.tracing.step import Step


class FabricStep(Step):
    """What `fabric.strategy.step()` returns: a context manager and decorator, which may be entered many times.

    Args:
        steps: opens and numbers it.
        kind: whether it trains or evaluates.
        name: of the step in messages and dumps; by default that of a decorated function.
        inputs: the batch, to explain compiles by; by default the loader's last one.
    """

    def __init__(self, steps: FabricSteps, kind: StepKind, *, name: str | None, inputs: Any) -> None:
        super().__init__(name=name, config=steps.config, seed=None, hint="")
        self._steps = steps
        self._kind: StepKind = kind
        self._inputs = inputs

    def scope(self) -> AbstractContextManager[Any]:
        """The context of one call of the step, with the random numbers of its number."""
        return self._steps.run(self._kind, self._name or f"{self._kind}_step", self._inputs)


def made_or_applied(step: FabricStep, function: Callable[..., Any] | None) -> Any:
    """The step itself, or the function that it decorates if it was used as a decorator without arguments.

    Raises:
        ConfigError: `function` is neither a function nor None.
    """
    if function is None:
        return step
    if not callable(function):
        raise ConfigError(f"step({function!r}): give the step's name by keyword, name={function!r}")
    return step(function)
