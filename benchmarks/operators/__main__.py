"""Which of torch's core operators are part of a step's graph; `python -m benchmarks.operators`.

The operators are those that torch tags as core; sample inputs (float32, where the operator takes it) are those of
torch's own tests. Each sample runs inside a step with on_graph_break="error", forward and, where it has one, backward.
  in the graph       torch_xla's kernel for the operator;
  by decomposition   other operators in its place, in the same graph: ours or torch's;
  on the host        it was refused, counted as computed on the host, or split the step. That is so for an operator
                     whose result has a shape that depends on values;
  fails              another error, or the process died;
  difference         the largest to the CPU of results, gradients and arguments written to, of values above 1 relative;
                     less what the CPU itself is off in float32, against float64, where that is more than the limit.
The worst sample of an operator decides. Of a backward operator only `backward` says how it runs.
"""

from __future__ import annotations

import functools
import sys
from dataclasses import asdict

from benchmarks import report
from benchmarks.operators.cases import MOST_CASES, Case, choose, core_operators, sources
from benchmarks.operators.measure import LIMIT, Row, markdown, rows, summary, table_of
from tests.children import run_in_child

SHARE = 0.95


def named(names: str) -> list[str]:
    """The core operators with these names (comma separated); all if empty.

    Raises:
        ValueError: a name is of none.
    """
    every = core_operators()
    chosen = [name.strip() for name in names.split(",") if name.strip()]
    for name in chosen:
        if name not in every:
            raise ValueError(f"{name!r} is not a core operator; those are {', '.join(every)}")
    return chosen or every


def add_targets(made: report.Report, found: list[Row]) -> None:
    """Adds the targets; an operator that was not tried counts as one that is not in the graph."""
    share = sum(row.in_graph for row in found) / len(found)
    made.target("share of core operators in the graph", share, "at least", SHARE)
    differs = sum(row.in_graph and row.differs for row in found)
    made.target(f"operators in the graph that differ from the CPU by more than {LIMIT:g}", differs, "exactly", 0)
    made.target("operators that fail", sum(row.how == "fails" for row in found), "exactly", 0)


def _chosen(operators: list[str], timeout: float) -> dict[str, list[Case]]:
    """The cases of each operator, found in a child, since the parent of others does not compute."""
    outcome = run_in_child(functools.partial(choose, operators), timeout=timeout)
    if not outcome.ok:
        raise RuntimeError(f"the samples could not be recorded: {outcome.error}\n{outcome.output}")
    found: dict[str, list[Case]] = outcome.value
    return found


def main(command: list[str] | None = None) -> int:
    """The program."""
    options, operators = report.of_table(str(__doc__), command, named, only="names of operators", timeout=120)
    sources()
    report.freeze_imports()
    made = report.Report("operators", settings={"samples": MOST_CASES, "limit": LIMIT})
    found: list[Row] = []
    for row in rows(_chosen(operators, options.timeout), options.timeout):
        found.append(row)
        state = f"{row.how or 'not tried'}, difference {row.difference}"
        print(f"[{len(found)}/{len(operators)}] {row.operator}: {state}", file=sys.stderr, flush=True)
        made.results["rows"] = [
            asdict(one) | {"how": one.how, "in_graph": one.in_graph, "differs": one.differs} for one in found
        ]
        made.save(options)
    add_targets(made, found)
    print(str(__doc__).split("\n\n", 1)[1])
    print(markdown(found) if options.markdown else table_of(found))
    print(f"\n{summary(found)}")
    return made.finish(options)


if __name__ == "__main__":
    sys.exit(main())
