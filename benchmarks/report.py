"""The output of a benchmark: tables, targets with limits, a JSON file, an exit code."""

from __future__ import annotations

import argparse
import gc
import json
import operator
import os
import platform
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, Literal, TextIO, TypeVar

_Chosen = TypeVar("_Chosen")
_Row = TypeVar("_Row")
Comparison = Literal["at least", "at most", "exactly"]
_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "at least": operator.ge,
    "at most": operator.le,
    "exactly": operator.eq,
}
# Environment of children. Compiling takes most of their time. These flags reduce LLVM's optimizations; graphs and XLA's
# passes are the same.
CHILDREN = {
    "XLA_FLAGS": os.environ.get("XLA_FLAGS", "--xla_backend_optimization_level=0"),
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


@dataclass(frozen=True)
class Target:
    """A figure and what it must be.

    Args:
        name: what is measured.
        value: what was measured; `None` if it could not be, which misses the target.
        comparison: how value and limit must stand.
        limit: the value to compare with.
    """

    name: str
    value: float | None
    comparison: Comparison
    limit: float

    @property
    def met(self) -> bool:
        """Whether the value satisfies the limit."""
        return self.value is not None and _COMPARE[self.comparison](self.value, self.limit)


def table(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Aligned plain text: numbers to the right, words to the left."""
    cells = [[text_of(value) for value in row] for row in rows]
    widths = [max(len(line[i]) for line in [list(headers), *cells]) for i in range(len(headers))]
    right = [
        bool(rows) and all(row[i] is None or isinstance(row[i], (int, float)) for row in rows)
        for i in range(len(headers))
    ]

    def line(values: Sequence[str]) -> str:
        padded = [v.rjust(w) if r else v.ljust(w) for v, w, r in zip(values, widths, right, strict=True)]
        return "  ".join(padded).rstrip()

    return "\n".join([line(headers), "  ".join("-" * width for width in widths), *map(line, cells)])


def table_of(rows: Sequence[object], columns: Mapping[str, str | Callable[[Any], object]]) -> str:
    """A table of objects.

    Args:
        rows: the objects.
        columns: what is shown of each, by header: an attribute, or a function of it.
    """

    def value(row: object, of: str | Callable[[Any], object]) -> object:
        return getattr(row, of) if isinstance(of, str) else of(row)

    return table(tuple(columns), [[value(row, of) for of in columns.values()] for row in rows])


def markdown(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table as the documents have it."""
    lines = [headers, ["---"] * len(headers), *([_in_documents(value) for value in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _in_documents(value: object) -> str:
    return f"{value:.0e}" if isinstance(value, float) else text_of(value)


def text_of(value: object) -> str:
    """A value as the tables show it."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        if value != 0 and abs(value) < 1e-3:
            return f"{value:.1e}"
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return str(value)


@dataclass
class Report:
    """Collects what a program found, prints it, and decides the exit code.

    Args:
        name: of the benchmark.
        settings: what it ran with.
        results: everything measured, as plain JSON values.
        targets: figures with limits.
    """

    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    results: dict[str, Any] = field(default_factory=dict)
    targets: list[Target] = field(default_factory=list)

    def target(self, name: str, value: float | None, comparison: Comparison, limit: float) -> None:
        """Adds a target."""
        self.targets.append(Target(name, value, comparison, limit))

    def target_table(self) -> str:
        """Every target, met or not."""
        rows = [
            (t.name, t.value, f"{t.comparison} {text_of(t.limit)}", "met" if t.met else "MISSED") for t in self.targets
        ]
        return table(("target", "value", "limit", ""), rows)

    def write_json(self, path: Path) -> None:
        """Everything, with the versions and the machine it was measured on."""
        targets = [
            {"name": t.name, "value": t.value, "comparison": t.comparison, "limit": t.limit, "met": t.met}
            for t in self.targets
        ]
        document = {
            "benchmark": self.name,
            "measured": datetime.now(UTC).isoformat(timespec="seconds"),
            "environment": environment(),
            "settings": self.settings,
            "results": self.results,
            "targets": targets,
        }
        path.write_text(json.dumps(document, indent=2) + "\n")

    def save(self, options: argparse.Namespace) -> None:
        """Writes the file that was asked for, if one was; what is known so far, when called before the end."""
        if options.json is not None:
            self.write_json(options.json)

    def finish(self, options: argparse.Namespace, out: TextIO = sys.stdout) -> int:
        """Prints the targets, writes the file that was asked for, and returns the exit code.

        That is 1 under `--check` if a target is missed (or there is none to check), else 0.
        """
        self.save(options)
        if options.check:
            print(f"\n{self.target_table()}", file=out)
            return 0 if self.targets and all(target.met for target in self.targets) else 1
        return 0


def environment() -> dict[str, Any]:
    """Versions and machine, for the JSON file."""
    return {
        "versions": {one.name: one.version for one in distributions()},
        "python": platform.python_version(),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "pjrt_device": os.environ.get("PJRT_DEVICE", "unset"),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def parser(description: str) -> argparse.ArgumentParser:
    """An argument parser with the options that all benchmarks share."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--json", type=Path, metavar="FILE", help="write everything measured to FILE")
    made.add_argument("--check", action="store_true", help="print every target; exit with 1 if one is missed")
    return made


def of_table(
    module: str,
    command: list[str] | None,
    named: Callable[[str], list[_Chosen]],
    *,
    only: str,
    timeout: float,
    flags: Sequence[str] = (),
) -> tuple[argparse.Namespace, list[_Chosen]]:
    """The command line of a benchmark whose table has a row for each thing that it runs in a child.

    Args:
        module: its docstring.
        command: the arguments; None for those of the process.
        named: returns what is chosen by name; raises `ValueError` for a name that there is not.
        only: what the names are of.
        timeout: the default, in seconds.
        flags: further options that take no value.

    Returns:
        The options, and what was chosen.
    """
    made = parser(module.splitlines()[0])
    made.add_argument("--only", default="", metavar="NAMES", help=f"comma-separated {only}")
    made.add_argument("--timeout", type=float, default=timeout, help="seconds per run")
    for flag in flags:
        made.add_argument(flag, action="store_true", help="see above")
    made.add_argument("--markdown", action="store_true", help="print the table as the documents have it")
    options = made.parse_args(command)
    try:
        return options, named(options.only)
    except ValueError as error:
        made.error(str(error))


def names_in(parser: argparse.ArgumentParser, text: str, known: Collection[str], *, between: str = ";") -> list[str]:
    """The names in the value of an option; ends the program if one is not known."""
    names = [name.strip() for name in text.split(between) if name.strip()]
    for name in names:
        if name not in known:
            parser.error(f"there is no {name!r}, but {f'{between} '.join(known)}")
    return names


def matching(words: str, every: Sequence[_Chosen], name: Callable[[_Chosen], str], what: str) -> list[_Chosen]:
    """Those with one of the names, or whose name contains one of the words (comma separated); all if empty.

    Raises:
        ValueError: a word matches none; the message lists what there is.
    """
    chosen: list[_Chosen] = []
    for word in (part.strip().lower() for part in words.split(",") if part.strip()):
        found = [one for one in every if word == name(one).lower()]
        found = found or [one for one in every if word in name(one).lower()]
        if not found:
            raise ValueError(f"no {what} is called {word!r}; there are {', '.join(map(name, every))}")
        chosen += [one for one in found if one not in chosen]
    return chosen or list(every)


def measured(
    made: Report,
    options: argparse.Namespace,
    things: Sequence[_Chosen],
    measure: Callable[[_Chosen], _Row],
    *,
    name: Callable[[_Row], str],
    state: Callable[[_Row], object],
    verdict: Callable[[_Row], dict[str, Any]] = lambda row: {},
) -> list[_Row]:
    """Measures one thing after another, with a line for each, and saves what is known so far.

    Args:
        made, options: of the program.
        things: what is measured.
        measure: makes a row (a dataclass) of a thing.
        name, state: of a row, for its line.
        verdict: what the file has of a row beside its fields.
    """
    rows: list[_Row] = []
    for number, thing in enumerate(things, start=1):
        row = measure(thing)
        rows.append(row)
        print(f"[{number}/{len(things)}] {name(row)}: {state(row)}", file=sys.stderr, flush=True)
        made.results["rows"] = [asdict(one) | verdict(one) for one in rows]  # type: ignore[call-overload]
        made.save(options)
    return rows


def freeze_imports() -> None:
    """Children neither look through nor copy what the imports made."""
    gc.collect()
    gc.freeze()
