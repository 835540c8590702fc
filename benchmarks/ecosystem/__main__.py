"""Which trainers train which models as one graph per step; `python -m benchmarks.ecosystem`.

Each cell is a trainer with a tiny model, trained for 6 steps several times with the same seed and data, each time in a
process of its own: by the stock trainer on plain CPU torch, by ours on XLA with on_graph_break="error", and, where an
operation is refused so, with "warn", which executes the step in pieces. Dropout is off, to compare numbers.
  compiles     graphs compiled in all;
  executions   in one step, the number furthest from 1;
  losses, weights   largest difference to the CPU: of a loss (relative, for losses above 1), of a weight at the end;
  replayed     calls of the step that ran without its Python, of all calls. Those of Fabric are traced always.
What is not one execution per step under "error" is listed with the error that was raised.
"""

from __future__ import annotations

import sys
from dataclasses import asdict

from benchmarks import report
from benchmarks.ecosystem.cell import LEARNING_RATE, LOSS_LIMIT, STEPS, WEIGHT_LIMIT, Cell, Row, measure
from benchmarks.ecosystem.output import markdown, table_of
from benchmarks.ecosystem.table import cells

SHARE = 0.9


def named(names: str) -> list[Cell]:
    """The cells whose `trainer x model` contains one of the words (comma separated); all if empty.

    Raises:
        ValueError: a word matches none.
    """
    every = cells()
    words = [word.strip().lower() for word in names.split(",") if word.strip()]
    for word in words:
        if not any(word in cell.name.lower() for cell in every):
            raise ValueError(f"no cell is called {word!r}; there are {', '.join(cell.name for cell in every)}")
    return [cell for cell in every if not words or any(word in cell.name.lower() for word in words)]


def _verdict(row: Row) -> dict[str, bool]:
    return {"single_execution": row.single_execution, "equal": row.equal}


def add_targets(made: report.Report, rows: list[Row]) -> None:
    """Adds the targets for the cells that ran."""
    one = sum(row.single_execution for row in rows)
    made.target("share of cells with 1 execution per step under error", one / len(rows), "at least", SHARE)
    made.target("cells that crashed", sum(row.error is not None for row in rows), "exactly", 0)
    made.target("cells with the CPU's losses and weights", sum(row.equal for row in rows), "exactly", len(rows))
    unexplained = sum(not row.single_execution and row.why is None for row in rows)
    made.target("cells that are split without a reason", unexplained, "exactly", 0)


def main(command: list[str] | None = None) -> int:
    """The program."""
    options, chosen = report.of_table(str(__doc__), command, named, only="parts of `trainer x model`", timeout=300)
    for cell in chosen:
        cell.prepare()
    report.freeze_imports()
    made = report.Report("ecosystem", settings={"steps": STEPS, "learning_rate": LEARNING_RATE})
    rows: list[Row] = []
    for number, cell in enumerate(chosen, start=1):
        row = measure(cell, options.timeout)
        rows.append(row)
        state = row.why or f"1 execution per step, {row.replays} of {row.calls} calls replayed"
        print(f"[{number}/{len(chosen)}] {cell.name} ({row.seconds:.0f} s): {state}", file=sys.stderr, flush=True)
        made.results["rows"] = [asdict(one) | _verdict(one) for one in rows]
        made.save(options)
    add_targets(made, rows)
    print(str(__doc__).split("\n\n", 1)[1])
    print(markdown(rows) if options.markdown else table_of(rows))
    single, equal = sum(row.single_execution for row in rows), sum(row.equal for row in rows)
    print(f'\n{single} of {len(rows)} cells train with 1 execution per step under on_graph_break="error";')
    print(f"{equal} have the CPU's losses (within {LOSS_LIMIT:g}) and weights (within {WEIGHT_LIMIT:g}).")
    return made.finish(options)


if __name__ == "__main__":
    sys.exit(main())
