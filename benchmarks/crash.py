"""Trainings killed at random moments, resumed, and compared bit by bit; `python -m benchmarks.crash`.

The trainings use dropout and save after every second step. Each process resumes from the checkpoints of the previous
one, and is killed with SIGKILL at a random (seeded) moment between its first loss and its end. Counted is whether the
next process
  resumed    reached a further loss, or the end;
  identical  and all of its losses equal those of an undisturbed training, bit for bit.
After a failure the next process starts with an empty folder. Then single bits are flipped, one at a time, in the last
checkpoint of an undisturbed training; a flip is "caught" if resuming from that checkpoint raises. With `fsdp`, eight
CPU devices train, save whole or sharded checkpoints, and resume on the same mesh. With `--grace`, ours get SIGTERM
first, and SIGKILL after at most so many seconds, unless they have saved and ended by themselves.

`--peers` adds transformers' and Lightning's own trainers, on the plain CPU, where they do best (on XLA neither restores
the random numbers of dropout). All runs are forked from one process that has imported everything.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from benchmarks import report
from tests.crash.killed_trainings import OURS, PEERS, RUNS
from tests.crash.kills import flip, kill


def main(arguments: list[str] | None = None) -> int:
    parser = report.parser(__doc__ or "")
    parser.add_argument("--kills", type=int, default=50, help="of each kind of training (50)")
    parser.add_argument("--bits", type=int, default=30, help="flipped in each kind of checkpoint (30)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments, and of the bits (0)")
    parser.add_argument("--grace", type=float, help="SIGTERM, and SIGKILL at most so many seconds after it")
    parser.add_argument("--peers", action="store_true", help="stock transformers and Lightning, too")
    parser.add_argument("--runs", help=f"only these, of: {'; '.join(RUNS)}")
    options = parser.parse_args(arguments)
    names = list(RUNS if options.peers else OURS)
    if options.runs:
        names = report.names_in(parser, options.runs, RUNS)
    results, silent = [], {}
    for name in names:
        with tempfile.TemporaryDirectory() as where:
            result = kill(name, options.kills, options.seed, Path(where), options.grace if name in OURS else None)
            result.bits = options.bits
            result.caught, silent[name] = flip(name, options.bits, options.seed, Path(where))
        results.append(result)
        print(
            f"{name}: {result.identical} of {result.kills} identical, {result.caught} of {result.bits} bits", flush=True
        )
    shown = {"run": "run", "kills": "kills", "in a save": "in_a_save", "ended in time": "ended", "resumed": "resumed"}
    shown |= {"identical": "identical", "bits caught": "caught", "of": "bits", "s per life": "seconds"}
    print(f"\n{report.table_of(results, shown)}")
    for result in results:
        for error in result.errors:
            print(f"\n{result.run} did not resume: {error[:300]}")
    made = report.Report(
        "crash",
        {"kills": options.kills, "bits": options.bits, "seed": options.seed, "grace": options.grace},
        {"rows": [asdict(result) for result in results], "bits_not_caught": silent},
    )
    for result in results:
        if result.run not in PEERS:
            made.target(f"{result.run}: resumed, identical", result.identical, "exactly", options.kills)
            made.target(f"{result.run}: flipped bits caught", result.caught, "exactly", options.bits)
    return made.finish(options)


if __name__ == "__main__":
    sys.exit(main())
