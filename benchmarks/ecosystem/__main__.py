"""Which trainers train which models as one graph per step; `python -m benchmarks.ecosystem`.

Each cell is a trainer with a tiny model, trained for 6 steps several times with the same seed and data, each time in a
process of its own: by the stock trainer on plain CPU torch, by ours on XLA with on_graph_break="error", and, where an
operation is refused so, with "warn", which executes the step in pieces. Dropout is off, to compare numbers.
  compiles     graphs compiled in all;
  executions   in one step, the number furthest from 1; without those of a trainer that generates, one for each token;
  losses, weights   largest difference to the CPU: of a loss (relative, for losses above 1), of a weight at the end;
  replayed     calls of the step that ran without its Python, of all calls. Those of Fabric are traced always.
What is not one execution per step under "error" is listed with the error that was raised.

With --architectures, transformers' Trainer with each of the 39 architectures of `benchmarks.zoo` instead, of which only
the losses are compared; --bf16 trains them under bfloat16 autocast. With --multimodal, models of images and texts, of
sound, and of objects in pictures, with several pictures in a text, and transcripts and boxes of other numbers.
"""

from __future__ import annotations

import sys

from benchmarks import report
from benchmarks.ecosystem.cell import LEARNING_RATE, STEPS, Cell, Row, markdown, measure, table_of
from benchmarks.ecosystem.table import cells, multimodal
from benchmarks.ecosystem.with_transformers import architectures

# 70 of 73 and 50 of 57.
SHARE, REPLAYED = 0.958, 0.877
# The same of models of images, sound and boxes.
MULTIMODAL = 0.75, 0.6


def named(names: str, every: list[Cell]) -> list[Cell]:
    """The cells whose `trainer x model` contains one of the words (comma separated); all if empty.

    Raises:
        ValueError: a word matches none.
    """
    return report.matching(names, every, lambda cell: cell.name, "cell")


def _verdict(row: Row) -> dict[str, bool]:
    return {"single_execution": row.single_execution, "equal": row.equal}


def add_targets(made: report.Report, rows: list[Row], share: float = SHARE, replays: float = REPLAYED) -> None:
    """Adds the targets for the cells that ran.

    Args:
        made: gets them.
        rows: of the cells.
        share: of those with one execution per step.
        replays: share of those that are replayed.
    """
    one = sum(row.single_execution for row in rows)
    made.target("share of cells with 1 execution per step under error", one / len(rows), "at least", share)
    made.target("cells that crashed", sum(row.error is not None for row in rows), "exactly", 0)
    made.target("cells with the CPU's losses and weights", sum(row.equal for row in rows), "exactly", len(rows))
    replayable = [row for row in rows if row.calls is not None]
    if replayable:
        replayed = sum(bool(row.replays) for row in replayable)
        made.target("share of cells that are replayed, Fabric aside", replayed / len(replayable), "at least", replays)
    unexplained = sum(not row.single_execution and row.why is None for row in rows)
    made.target("cells that are split without a reason", unexplained, "exactly", 0)


def main(command: list[str] | None = None) -> int:
    """The program."""
    arguments = sys.argv[1:] if command is None else command
    bf16 = "--bf16" in arguments
    of_media = "--multimodal" in arguments
    every = (
        multimodal() if of_media else architectures(bf16=bf16) if bf16 or "--architectures" in arguments else cells()
    )
    flags = ("--architectures", "--bf16", "--multimodal")
    options, chosen = report.of_table(
        str(__doc__),
        command,
        lambda names: named(names, every),
        only="parts of `trainer x model`",
        timeout=300,
        flags=flags,
    )
    for cell in chosen:
        cell.prepare()
    report.freeze_imports()
    made = report.Report("ecosystem", settings={"steps": STEPS, "learning_rate": LEARNING_RATE})
    rows = report.measured(
        made,
        options,
        chosen,
        lambda cell: measure(cell, options.timeout),
        name=lambda row: f"{row.trainer} x {row.model} ({row.seconds:.0f} s)",
        state=lambda row: row.why or f"1 execution per step, {row.replays} of {row.calls} calls replayed",
        verdict=_verdict,
    )
    add_targets(made, rows, *(MULTIMODAL if of_media else (SHARE, REPLAYED)))
    print(str(__doc__).split("\n\n", 1)[1])
    print(markdown(rows) if options.markdown else table_of(rows))
    single, equal = sum(row.single_execution for row in rows), sum(row.equal for row in rows)
    print(f'\n{single} of {len(rows)} cells train with 1 execution per step under on_graph_break="error";')
    limits = f"losses (within {chosen[0].loss_limit:g}) and weights (within {chosen[0].weight_limit:g})"
    print(f"{equal} have the CPU's {limits}.")
    return made.finish(options)


if __name__ == "__main__":
    sys.exit(main())
