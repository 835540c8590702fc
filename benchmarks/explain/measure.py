"""A program with a planted fault, what it is told, and whether that is right."""

from __future__ import annotations

import functools
import inspect
import logging
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Literal

import torch

import xla_adapters
from benchmarks import report
from tests.children import run_in_child
from xla_adapters.errors import XLAAdapterError

Loop = Literal["step()", "CompiledStep", "HF Trainer", "Lightning"]
MARK = "# planted: "


@dataclass(frozen=True)
class Program:
    """A program of the table. Its line is marked in its source by a comment, `# planted: NAME`.

    Attributes:
        name: of the fault.
        run: trains, in a child.
        cause: a pattern of what must be given as the cause; None for what is harmless: then nothing may be reported.
        remedy: a pattern of what must be advised.
        loop: what runs the steps. Everything outside of the steps of loops without a trainer is run eagerly.
        has_line: False where an entry of the batch or an option of the trainer is at fault: its name is in `cause`.
        graphs: how many graphs the step has if the fault is harmless.
    """

    name: str
    run: Callable[[], object]
    cause: str | None
    remedy: str = ""
    loop: Loop = "step()"
    has_line: bool = True
    graphs: int = 1

    def train(self) -> None:
        """Runs it."""
        with xla_adapters.eager() if self.loop in ("step()", "CompiledStep") else nullcontext():
            self.run()

    @property
    def planted(self) -> str:
        """`FILE:LINE` of the line that is marked.

        Raises:
            ValueError: there is none, or there are several.
        """
        file = inspect.getsourcefile(self.run)
        assert file is not None
        with open(file, encoding="utf-8") as source:
            lines = [number for number, line in enumerate(source, 1) if line.rstrip().endswith(MARK + self.name)]
        if len(lines) != 1:
            raise ValueError(f"{len(lines)} lines of {file} are marked with {MARK}{self.name}")
        return f"{file}:{lines[0]}"


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
    outcome = run_in_child(functools.partial(_listen, run), timeout=timeout, env=report.CHILDREN)
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
    return re.split(r"\n  (?:what to do|remedies): ", report)[-1] if re.search(r"\n  (?:w|remed)", report) else ""


_HEADERS = ("fault", "loop", "expected", "cause", "line", "remedy", "other reports")


def table_of(rows: Sequence[Row]) -> str:
    """The rows, then what was said of those that are not right."""
    text = report.table(_HEADERS, [_values(row) for row in rows])
    wrong = [f"  {row.name}: {row.error or row.said or 'nothing'}" for row in rows if not _right(row)]
    return f"{text}\n\nnot right; said was:\n" + "\n".join(wrong) if wrong else text


def markdown(rows: Sequence[Row]) -> str:
    """The same for the documents, with all that was said."""
    table = report.markdown(_HEADERS, [_values(row) for row in rows])
    said = "\n".join(f"{row.name} ({row.loop}):\n\n{_indented(row.said)}\n" for row in rows if not row.harmless)
    return f"{table}\n\n## What is said\n\n{said}"


def _values(row: Row) -> tuple[object, ...]:
    expected = "nothing, one graph" if row.harmless else "a report"
    marks = ["yes" if value else "NO" for value in (row.cause, row.line, row.remedy)]
    return (row.name, row.loop, expected, *marks, len(row.others))


def _right(row: Row) -> bool:
    return row.cause and row.line and row.remedy and not row.others


def _indented(text: str) -> str:
    without_folders = re.sub(r"/\S*/(site-packages/|(?=benchmarks/))", "", text)
    return "\n".join(f"    {line}" for line in without_folders.splitlines())
