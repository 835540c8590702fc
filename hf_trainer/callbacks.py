"""The trainer's own callbacks: two that report the loop's events, and one that prints statistics."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Protocol

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import CallbackHandler

from xla_adapters.insight.run_record import RunRecord, RunStats
from xla_adapters.insight.times import CALLBACKS


class TrainingEvents(Protocol):
    """The events of the training loop that the callbacks report; `Bridge` receives them."""

    def training_begins(self) -> None:
        """The model and the optimizer of a training are there."""

    def optimizer_stepped(self) -> None:
        """The optimizer has stepped."""

    def substep_ended(self) -> None:
        """A micro batch without an update has ended."""

    def step_is_done(self, control: TrainerControl) -> None:
        """An optimizer step and all its callbacks are done."""

    def accumulation_stopped(self) -> None:
        """The loop stops between two micro batches of an update."""


def surround(handler: CallbackHandler, first: TrainerCallback, last: TrainerCallback, record: RunRecord) -> None:
    """Calls two callbacks around those of a handler at each event. They are not listed in `handler.callbacks`.

    Args:
        handler: of a trainer.
        first: called before the others.
        last: called after the others.
        record: told while the others run.
    """
    call_event: Callable[..., TrainerControl] = handler.call_event
    clock, transfers = record.clock, record.transfers

    def surrounded(event: str, args: Any, state: Any, control: TrainerControl, **kwargs: Any) -> TrainerControl:
        getattr(first, event)(args, state, control, **kwargs)
        with clock.during(CALLBACKS):
            if clock.is_running and transfers.looks:
                control = transfers.looked_through(call_event, event, args, state, control, **kwargs)
            else:
                control = call_event(event, args, state, control, **kwargs)
        getattr(last, event)(args, state, control, **kwargs)
        return control

    handler.call_event = surrounded  # type: ignore[method-assign]


class FirstCallback(TrainerCallback):
    """Comes before all other callbacks, so that these see the step executed.

    Args:
        events: told of each event.
    """

    def __init__(self, events: TrainingEvents) -> None:
        self._events = events

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._events.training_begins()

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._events.optimizer_stepped()

    def on_substep_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._events.substep_ended()


class LastCallback(TrainerCallback):
    """Comes after all other callbacks, to see the decisions that they put into `control`.

    Args:
        events: told of each event.
    """

    def __init__(self, events: TrainingEvents) -> None:
        self._events = events

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._events.step_is_done(control)

    def on_substep_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if control.should_epoch_stop or control.should_training_stop:
            self._events.accumulation_stopped()


class XLAStatsCallback(TrainerCallback):
    """Prints at the end of a training how many compiles it had, how many executions per step, and its throughput.

    Attributes:
        stats: the numbers. The trainer that has the callback sets them.
    """

    def __init__(self) -> None:
        self.stats = RunStats()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.stats.stop()
        if state.is_world_process_zero:
            print(f"\nwhat the training cost\n{self.stats.summary()}", file=sys.stderr)
