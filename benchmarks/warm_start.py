"""The second start of a training, with the compile cache; `python -m benchmarks.warm_start`.

Each training of a GPT-2 (batches of 8 x 32 tokens, AdamW, dropout) runs in two processes that share a folder of
compiled programs: six steps each, those of the sharded ones on eight devices. The first process finds it empty.
  compiled     programs that a process compiled, those of single operations, too;
  first step   seconds from the making of the model to the end of the first step: Python, tracing, compiling or loading.
"Killed" saves, is ended by SIGKILL, and is resumed by the second process. On TorchTPU (`.venv-torch-tpu/bin/python`)
the cache is its own.
"""

from __future__ import annotations

import os
import sys
import tempfile
from functools import partial
from pathlib import Path

os.environ.setdefault("PJRT_DEVICE", "CPU")
os.environ["XLA_ADAPTERS_CACHE_DIR"] = ""

from tests.device import ON_TORCH_TPU

if ON_TORCH_TPU:
    from tests.torch_tpu import session  # noqa: F401

from benchmarks import report
from tests.children import run_in_child
from tests.runtime import warm_trainings as warm

_TIMED = ("HF Trainer", "Lightning", "CompiledStep", "TRL SFT")
_KILLED = "HF Trainer, killed"


def measure(name: str, layers: int, width: int, timeout: float) -> dict[str, object]:
    """Runs a training twice."""
    with tempfile.TemporaryDirectory() as folder:
        train = partial(warm.train, name, layers, width, Path(folder))
        if name == _KILLED:
            output = f"{folder}/output"
            run_in_child(partial(warm.killed, layers, width, Path(folder), output), timeout=timeout)
            outcomes = [run_in_child(partial(warm.resumed, layers, width, Path(folder), output), timeout=timeout)]
        else:
            outcomes = [run_in_child(train, timeout=timeout) for _ in range(2)]
    row: dict[str, object] = {"training": name, "error": "; ".join(o.short_error for o in outcomes if o.short_error)}
    if not row["error"]:
        first, second = outcomes[0].value, outcomes[-1].value
        row |= {"first": first.compiles, "second": second.compiles, "loaded": second.loads}
        row |= {"cold": first.first_step, "warm": second.first_step, "equal": first.losses == second.losses}
        row["ratio"] = second.first_step / first.first_step if first.first_step else None
    print(row, file=sys.stderr, flush=True)
    return row


def main(arguments: list[str] | None = None) -> int:
    parser = report.parser(__doc__ or "")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--timeout", type=float, default=600, help="seconds for one process")
    parser.add_argument("--only", default="", help="trainings whose name has this in it")
    options = parser.parse_args(arguments)
    names = [*warm.ON_THIS_RUNTIME, *([] if ON_TORCH_TPU else [*warm.SHARDED, _KILLED])]
    report.freeze_imports()
    rows = [measure(name, options.layers, options.width, options.timeout) for name in names if options.only in name]
    columns = {"compiled at first": "first", "then": "second", "loaded": "loaded", "first step s": "cold"}
    columns |= {"then s": "warm", "ratio": "ratio", "losses equal": "equal", "error": "error"}
    shown = {"training": "training", **columns}
    print(report.table(list(shown), [[row.get(key, "") for key in shown.values()] for row in rows]))
    made = report.Report("warm_start", {"layers": options.layers, "width": options.width}, {"rows": rows})
    for row in rows:
        name = row["training"]
        made.target(f"{name}: compiled in the second process", row.get("second"), "exactly", 0)  # type: ignore[arg-type]
        made.target(f"{name}: losses equal", float(bool(row.get("equal"))), "exactly", 1)
        if name in _TIMED:
            made.target(f"{name}: time to the first step, to that of process 1", row.get("ratio"), "at most", 0.5)  # type: ignore[arg-type]
    return made.finish(options)


if __name__ == "__main__":
    sys.exit(main())
