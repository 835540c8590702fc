"""What a program is told, and whether that is right."""

from __future__ import annotations

import functools
import logging
import os
import re
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from benchmarks.explain.program import Program
from tests.children import run_in_child
from xla_adapters.errors import XLAAdapterError

# Compiling takes most of the time. These flags reduce LLVM's optimizations; graphs and XLA's passes are the same.
_ENVIRONMENT = {
    "XLA_FLAGS": os.environ.get("XLA_FLAGS", "--xla_backend_optimization_level=0"),
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
_GRAPH = re.compile(r"^(?P<step>\S+): compiled graph (?P<number>\d+) in")
# How torch_xla's own text about an execution begins.
_DUMP = "Execution Analysis:"


@dataclass
class Told:
    """What a run logged, warned of or raised.

    Attributes:
        reports: the warnings and the error, in order.
        graphs: how many graphs each step compiled, by its name.
        dumps: whether torch_xla printed a text of its own.
    """

    reports: list[str] = field(default_factory=list)
    graphs: dict[str, int] = field(default_factory=dict)
    dumps: bool = False


class _Collector(logging.Handler):
    def __init__(self, told: Told) -> None:
        super().__init__(logging.INFO)
        self._told = told

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if compiled := _GRAPH.match(message):
            self._told.graphs[compiled["step"]] = int(compiled["number"])
        if record.levelno >= logging.WARNING:
            self._told.reports.append(message)


def _listen(run: Callable[[], object]) -> Told:
    told = Told()
    logger = logging.getLogger("xla_adapters")
    logger.setLevel(logging.INFO)
    logger.addHandler(_Collector(told))
    torch.manual_seed(0)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            run()
        except XLAAdapterError as error:
            told.reports.append(f"{type(error).__name__}: {error}")
    ours = [warning for warning in said if warning.category.__module__.startswith("xla_adapters")]
    told.reports += [f"{warning.category.__name__}: {warning.message}" for warning in ours]
    return told


def listen(run: Callable[[], object], timeout: float) -> Told:
    """Runs a program in a child.

    Raises:
        RuntimeError: it came to no end, or to an error that is none of the adapters'.
    """
    outcome = run_in_child(functools.partial(_listen, run), timeout=timeout, env=_ENVIRONMENT)
    if not outcome.ok:
        raise RuntimeError(f"{outcome.error}\n{outcome.output}")
    told: Told = outcome.value
    told.dumps = _DUMP in outcome.output
    return told


@dataclass
class Row:
    """A line of the table.

    Attributes:
        name, loop: see `Program`.
        harmless: whether nothing may be reported.
        cause, line, remedy: whether they are right; of what is harmless, whether nothing is reported.
        others: what is reported beside the fault.
        said: the report of the fault, or the first one.
        error: why the run did not come to its end, if so.
        dumps: whether torch_xla printed a text of its own.
    """

    name: str
    loop: str
    harmless: bool
    cause: bool = False
    line: bool = False
    remedy: bool = False
    others: list[str] = field(default_factory=list)
    said: str = ""
    error: str | None = None
    dumps: bool = False


def measure(program: Program, timeout: float) -> Row:
    """Runs a program, and compares what it is told with what was planted."""
    row = Row(program.name, program.loop, harmless=program.cause is None)
    try:
        told = listen(program.train, timeout)
    except RuntimeError as error:
        print(f"{program.name}:\n{error}", file=sys.stderr, flush=True)
        row.error = str(error).partition("\n--- ")[0].strip().splitlines()[-1]
        return row
    judge(program, told, row)
    return row


def judge(program: Program, told: Told, row: Row) -> None:
    """Fills in what is right.

    The report of the fault is the first one of its cause. Others of the same cause are later calls of the same fault.
    """
    row.dumps = told.dumps
    if program.cause is None:
        right = not told.reports and set(told.graphs.values()) == {program.graphs}
        row.cause = row.line = row.remedy = right
        row.others = told.reports
        row.said = f"graphs: {told.graphs}"
        return
    cause = re.compile(program.cause)
    of_fault = [report for report in told.reports if cause.search(_cause_of(report))]
    row.others = [report for report in told.reports if report not in of_fault]
    row.said = next(iter(of_fault or told.reports), "")
    row.cause = bool(of_fault)
    row.line = row.cause and (not program.has_line or _names(row.said, program.planted))
    row.remedy = row.cause and re.search(program.remedy, _remedy_of(row.said)) is not None


def _cause_of(report: str) -> str:
    return re.split(r"\n  (?:where|so far|what to do|cost): ", report)[0]


def _names(report: str, line: str) -> bool:
    where = re.search(r"\n  where: (.*(?:\n   .*)*)", report)
    return where is not None and re.search(re.escape(line) + r"\b", where[1]) is not None


def _remedy_of(report: str) -> str:
    return re.split(r"\n  (?:what to do|ways out): ", report)[-1] if "\n  w" in report else ""
