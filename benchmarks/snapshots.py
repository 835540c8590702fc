"""`StepSnapshots`: reads the device counters at the start and end of each step, with callbacks that any trainer has."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from xla_adapters import get_runtime
from xla_adapters.runtime import Metrics


def difference(before: Metrics, after: Metrics) -> dict[str, float]:
    """The counts between two readings."""
    older, newer = asdict(before), asdict(after)
    return {name: newer[name] - older[name] for name in newer}


@dataclass
class StepSnapshots(TrainerCallback):
    """Reads the counters where steps begin, end, and are logged; this transfers no data.

    Attributes:
        steps: counts of each step from `on_step_begin` to `on_step_end`, without logging.
        logged: counts of each step from `on_step_begin` to `on_log`, with logging.
        losses: the logged losses.
    """

    steps: list[dict[str, float]] = field(default_factory=list)
    logged: list[dict[str, float]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    first: Metrics | None = None
    last: Metrics | None = None
    _begin: Metrics | None = None

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._begin = get_runtime().counters.metrics()
        self.first = self.first or self._begin

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        assert self._begin is not None
        self.last = get_runtime().counters.metrics()
        self.steps.append(difference(self._begin, self.last))

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Any = None, **_: Any
    ) -> None:
        if logs is None or "loss" not in logs or self._begin is None:
            return
        self.last = get_runtime().counters.metrics()
        self.logged.append(difference(self._begin, self.last))
        self.losses.append(float(logs["loss"]))

    def between(self) -> dict[str, float]:
        """Counts from the start of the first step to the log of the last one."""
        assert self.first is not None
        assert self.last is not None
        return difference(self.first, self.last)
