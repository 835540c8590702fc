"""A trainer with a model: `Cell`, what its runs show, and the table."""

from __future__ import annotations

import functools
import re
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks import report
from tests.children import Outcome, run_in_child
from xla_adapters.config import OnGraphBreak
from xla_adapters.errors import GraphBreakError, GraphBreakWarning

STEPS, LEARNING_RATE = 6, 1e-3
# Of AdamW. With torch's 1e-8 a gradient that is zero but for rounding moves its weight as far as any other does.
EPSILON = 1e-6
# Of a loss, relative to losses above 1; of a weight. A step can move a weight by the learning rate, however small its
# gradient, so rounding shows: float32 on the CPU is 6e-5 from float64 after these steps (a bias of timm's ResNet).
LOSS_LIMIT, WEIGHT_LIMIT = 1e-5, 3e-4
# Of losses, with every architecture; and under bfloat16 autocast.
ARCHITECTURE_LIMIT, BF16_LIMIT, NO_LIMIT = 1e-4, 2e-2, 1e9

Weights = dict[str, np.ndarray[Any, Any]]


@dataclass(kw_only=True)
class Trained:
    """One training.

    Attributes:
        losses: of each step.
        weights: at the end.
        compiles: in all.
        executions: in each step.
        calls, replays: of the step; None where it is traced by design.
        reasons: why calls were traced, and how often.
        split: what the first warning of a split of the step says.
    """

    losses: list[float]
    weights: Weights = field(repr=False)
    compiles: int = 0
    executions: list[int] = field(default_factory=list)
    calls: int | None = None
    replays: int | None = None
    reasons: dict[str, int] = field(default_factory=dict)
    split: str | None = None


def weights_of(module: nn.Module) -> Weights:
    """Parameters and buffers of floating point, as arrays that another process can compare."""
    return {
        name: value.detach().to("cpu", torch.float32).numpy()
        for name, value in (*module.named_parameters(), *module.named_buffers())
        if value.is_floating_point()
    }


@dataclass(frozen=True)
class Refused:
    """A training that an operation in its step ended.

    Attributes:
        why: the first line of the error.
    """

    why: str


# Trains on XLA with this `on_graph_break`; on the plain CPU, by the stock trainer, for None.
Train = Callable[[OnGraphBreak | None], Trained]


@dataclass(frozen=True)
class Cell:
    """A trainer with a model.

    Attributes:
        trainer, model: their names.
        train: trains, in a child.
        prepare: called in the parent before it forks.
        loss_limit, weight_limit: how far it may be from the CPU.
    """

    trainer: str
    model: str
    train: Train
    prepare: Callable[[], object] = lambda: None
    loss_limit: float = LOSS_LIMIT
    weight_limit: float = WEIGHT_LIMIT

    @property
    def name(self) -> str:
        """To select it by."""
        return f"{self.trainer} x {self.model}"


@dataclass
class Row:
    """A line of the table.

    Attributes:
        trainer, model, loss_limit, weight_limit: see `Cell`.
        compiles, executions: under `on_graph_break="error"`; of the executions in a step the number furthest from 1.
        replays, calls, reasons: see `Trained`.
        loss_difference: the largest to the CPU, of losses above 1 relative to them.
        weight_difference: the largest to the CPU, at the end.
        split: what was said of an execution in the middle of a step.
        refused: why the training ended under `"error"`. All other figures are then those of `"warn"`.
        error: why a run did not come to its end, if so.
        seconds: for all runs.
    """

    trainer: str
    model: str
    compiles: int | None = None
    executions: int | None = None
    calls: int | None = None
    replays: int | None = None
    reasons: dict[str, int] = field(default_factory=dict)
    loss_difference: float | None = None
    weight_difference: float | None = None
    split: str | None = None
    refused: str | None = None
    error: str | None = None
    seconds: float = 0.0
    loss_limit: float = LOSS_LIMIT
    weight_limit: float = WEIGHT_LIMIT

    @property
    def equal(self) -> bool:
        """Whether losses and weights are the CPU's, within the limits."""
        return (
            self.loss_difference is not None
            and self.weight_difference is not None
            and self.loss_difference <= self.loss_limit
            and self.weight_difference <= self.weight_limit
        )

    @property
    def single_execution(self) -> bool:
        """Whether it trains under `on_graph_break="error"` with one execution per step."""
        return self.error is None and self.refused is None and self.executions == 1

    @property
    def why(self) -> str | None:
        """Why it takes more than one execution, or differs from the CPU, in one line; None if neither."""
        if self.error is not None:
            return f"crashed: {self.error}"
        if self.refused is not None:
            return self.refused
        wrong = (
            []
            if self.single_execution
            else [f"{self.executions} executions in a step: {self.split or 'no line splits it, others are around it'}"]
        )
        if not self.equal:
            wrong.append(f"differs from the CPU by {self.loss_difference} (losses), {self.weight_difference} (weights)")
        return "; ".join(wrong) or None

    def take(self, ours: Trained, plain: Trained) -> None:
        """Takes the figures of a training, compared with that on the CPU."""
        self.compiles = ours.compiles
        self.executions = max(ours.executions, key=lambda number: abs(number - 1), default=None)
        self.calls, self.replays = ours.calls, ours.replays
        self.split = ours.split
        self.reasons = {_without_folders(reason): times for reason, times in ours.reasons.items()}
        self.loss_difference = _largest(ours.losses, plain.losses)
        self.weight_difference = _furthest(ours.weights, plain.weights)


def _largest(ours: list[float], plain: list[float]) -> float | None:
    if len(ours) != len(plain) or len(ours) != STEPS:
        return None
    differences = [abs(one - other) / max(1.0, abs(other)) for one, other in zip(ours, plain, strict=True)]
    # Not max(): it may lose what is not a number.
    return float(np.max(differences))


def _furthest(ours: Weights, plain: Weights) -> float | None:
    if not ours or ours.keys() != plain.keys():
        return None
    return float(np.max([np.abs(value - plain[name]).max(initial=0.0) for name, value in ours.items()]))


def measure(cell: Cell, timeout: float) -> Row:
    """Trains on the CPU and on XLA, each in a child; if an operation is refused, once more with a warning for it."""
    row = Row(cell.trainer, cell.model, loss_limit=cell.loss_limit, weight_limit=cell.weight_limit)

    def run(on_graph_break: OnGraphBreak | None) -> Outcome:
        outcome = run_in_child(
            functools.partial(_outcome_of, cell.train, on_graph_break), timeout=timeout, env=report.CHILDREN
        )
        row.seconds += outcome.seconds
        if not outcome.ok:
            where = "the CPU" if on_graph_break is None else f'XLA, on_graph_break="{on_graph_break}"'
            print(f"{cell.name} on {where}:\n{outcome.error}\n{outcome.output}", file=sys.stderr, flush=True)
            row.error = row.error or f"{outcome.short_error} (on {where})"
        return outcome

    plain, ours = run(None), run("error")
    if ours.ok and isinstance(ours.value, Refused):
        row.refused = ours.value.why
        ours = run("warn")
    if plain.ok and ours.ok:
        row.take(ours.value, plain.value)
    return row


def _outcome_of(train: Train, on_graph_break: OnGraphBreak | None) -> Trained | Refused:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", GraphBreakWarning)
        try:
            trained = train(on_graph_break)
        except GraphBreakError as error:
            return Refused(_one_line(error))
    splits = [warning.message for warning in said if isinstance(warning.message, GraphBreakWarning)]
    trained.split = _one_line(splits[0]) if splits else None
    return trained


def _one_line(message: Exception) -> str:
    """What an error or warning says first, and where, without the folders of this machine."""
    lines = str(message).splitlines()
    where = [line.strip().removeprefix("where: ") for line in lines if line.strip().startswith("where:")]
    text = f"{type(message).__name__}: {lines[0].rstrip('.:')}"
    return _without_folders(f"{text} (at {where[0]})" if where else text)


def _without_folders(text: str) -> str:
    return re.sub(r"/\S*/(site-packages/|(?=benchmarks/))", "", text)


_HEADERS = ("trainer", "model", "compiles", "executions", "losses", "weights", "replayed", "1 execution")


def table_of(rows: list[Row]) -> str:
    """The rows, then why some are split or traced."""
    text = report.table(_HEADERS, [_values(row) for row in rows])
    split, traced = _explained(rows, _split), _explained(rows, _traced)
    if split:
        text += "\n\nnot one execution per step, or not equal, and why:\n" + "\n".join(f"  {line}" for line in split)
    if traced:
        text += "\n\nnever replayed, and why:\n" + "\n".join(f"  {line}" for line in traced)
    return text


def markdown(rows: list[Row]) -> str:
    """The same for the documents."""
    text = report.markdown(_HEADERS, [_values(row) for row in rows])
    for title, about in (("Not one execution per step", _split), ("Never replayed", _traced)):
        text += f"\n\n## {title}\n\n" + "\n".join(f"- {line}" for line in _explained(rows, about, code="`"))
    return text


def _values(row: Row) -> tuple[object, ...]:
    replayed = f"{row.replays} of {row.calls}" if row.calls is not None else "no"
    figures = (row.compiles, row.executions, row.loss_difference, row.weight_difference)
    return (row.trainer, row.model, *figures, replayed, row.single_execution)


def _split(row: Row) -> str | None:
    return row.why


def _traced(row: Row) -> str | None:
    """The most frequent reason of those that are given for a cell that is never replayed."""
    if row.replays != 0:
        return None
    return max(row.reasons, key=row.reasons.__getitem__, default="no reason was given")


def _explained(rows: list[Row], about: Callable[[Row], str | None], code: str = "") -> list[str]:
    """A line for each reason, with the cells that it is given for."""
    cells: dict[str, list[str]] = {}
    for row in rows:
        if (reason := about(row)) is not None:
            cells.setdefault(reason, []).append(f"{row.trainer} x {row.model}")
    return [f"{', '.join(names)}: {code}{reason}{code}" for reason, names in cells.items()]
