"""Whether what the adapters say of a fault is right; `python -m benchmarks.explain`.

Each program is a small training, as people write it, with one planted fault, in a process of its own. What the adapters
log, warn of and raise is compared with what was planted.
  cause     what is named as the cause;
  line      the line that is marked as the faulty one in the program's source; where an entry of the batch or
            an option of the trainer is at fault there is none, and its name must be in the cause;
  remedy    what is advised.
Where a fault costs nothing under the adapters, right is that nothing is reported and that the step has one graph.
Programs without a fault are those of `tests/programs`: whatever is reported of them is a false alarm.
"""

from __future__ import annotations

import functools
import sys

from benchmarks import report
from benchmarks.explain import own_loops, with_lightning, with_transformers
from benchmarks.explain.measure import Program, Row, listen, markdown, measure, table_of
from tests.programs import PROGRAMS

# Of the programs: 22 and 20 of 24.
LINES, REMEDIES = 22 / 24, 20 / 24
# Programs whose step compiles several graphs, which is reported rightly.
_RECOMPILED = ("vae-warmup", "loop-contrastive")


def programs() -> list[Program]:
    """All of them, by loop."""
    return [*own_loops.PROGRAMS, *with_transformers.PROGRAMS, *with_lightning.PROGRAMS]


def named(names: str) -> list[Program]:
    """The programs whose fault contains one of the words (comma separated); all if empty.

    Raises:
        ValueError: a word matches none.
    """
    return report.matching(names, programs(), lambda program: program.name, "fault")


def add_targets(made: report.Report, rows: list[Row], alarms: dict[str, list[str]]) -> None:
    """Adds the targets.

    Args:
        made: the report.
        rows: of the programs with a fault.
        alarms: what was reported of each program without one; empty if none was run.
    """
    both = sum(row.cause and row.line for row in rows) / len(rows)
    made.target("share of faults whose cause and line are right", both, "at least", LINES)
    made.target(
        "share of faults whose remedy is right", sum(row.remedy for row in rows) / len(rows), "at least", REMEDIES
    )
    made.target("reports beside the fault", sum(len(row.others) for row in rows), "exactly", 0)
    made.target("runs in which torch_xla prints a text of its own", sum(row.dumps for row in rows), "exactly", 0)
    made.target("programs that did not end", sum(row.error is not None for row in rows), "exactly", 0)
    if alarms:
        what = f"false alarms of {len(alarms)} programs without a fault"
        made.target(what, sum(map(len, alarms.values())), "exactly", 0)


def main(command: list[str] | None = None) -> int:
    """The program."""
    options, chosen = report.of_table(str(__doc__), command, named, only="parts of names of faults", timeout=180)
    report.freeze_imports()
    made = report.Report("explain")
    rows = report.measured(
        made,
        options,
        chosen,
        lambda program: measure(program, options.timeout),
        name=lambda row: row.name,
        state=lambda row: (
            row.error or f"cause {row.cause}, line {row.line}, remedy {row.remedy}, {len(row.others)} others"
        ),
    )
    alarms: dict[str, list[str]] = {}
    for clean in (one for one in PROGRAMS if one.name not in _RECOMPILED and not options.only):
        alarms[clean.name] = listen(functools.partial(clean.run, "auto"), options.timeout).reports
        print(f"{clean.name}: {len(alarms[clean.name])} false alarms", file=sys.stderr, flush=True)
    made.results["false alarms"] = alarms
    add_targets(made, rows, alarms)
    print(str(__doc__).split("\n\n", 1)[1])
    print(markdown(rows) if options.markdown else table_of(rows))
    for name, said in alarms.items():
        print(f"{name}: {len(said)} false alarms", *said, sep="\n  ")
    return made.finish(options)


if __name__ == "__main__":
    sys.exit(main())
