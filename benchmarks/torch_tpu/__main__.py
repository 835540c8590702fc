"""What a training step costs on TorchTPU, in each way to run it; `python -m benchmarks.torch_tpu`.

On XLA:CPU, which stands in for a TPU: launches and compiles are those of a TPU (they are counted where the PJRT plugin
is called), times are those of the host's Python and of dispatching. A GPT-2 and a Llama of 2 layers, AdamW with
clipping, a learning rate that falls linearly to 0. Medians of the steps after the sixth; compiles of all steps.
  host ms      CPU time of the thread that trains, from the batch on the device to the end of the update;
  difference   largest difference of a step's loss to the same training on the plain CPU.
"""

from __future__ import annotations

import functools
import os
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import report
from tests.children import run_in_child
from tests.torch_tpu import stand_in

_EXACT = 1e-5
_OF_EAGER = 1 / 20
_EAGER, _REPLAYED, _OUR_TRAINER = "TorchTPU, eager", "xla_adapters.CompiledStep", "hf_trainer.Trainer"
_OURS = ("xla_adapters.step()", _REPLAYED, _OUR_TRAINER)


def rows() -> list[tuple[str, str, str]]:
    """What is measured: name, function of `trainings`, and the function of the training it is compared with."""
    return [
        ("transformers.Trainer, device set by hand", "stock_trainer", "trainer_on_cpu"),
        (_EAGER, "eager", "plain_cpu"),
        ("TorchTPU, fused eager", "fused_eager", "plain_cpu"),
        ("torch.compile of model and optimizer", "compiled", "plain_cpu"),
        (_OURS[0], "ours_traced", "plain_cpu"),
        (_REPLAYED, "ours_replayed", "plain_cpu"),
        (_OUR_TRAINER, "our_trainer", "trainer_on_cpu"),
    ]


def measure(model: str, steps: int, timeout: float) -> list[dict[str, Any]]:
    """All rows of one model."""
    from benchmarks.torch_tpu import trainings

    def run(function: str, **options: bool) -> Any:
        train = functools.partial(getattr(trainings, function), model, steps, **options)
        outcome = run_in_child(train, timeout=timeout)
        print(f"{model}, {function}: {outcome.short_error or 'done'}", file=sys.stderr, flush=True)
        return outcome

    references = {name: run(name).value for name in ("plain_cpu", "trainer_on_cpu")}
    constant = run("plain_cpu", falls=False).value
    measured = []
    for name, function, reference in rows():
        outcome = run(function)
        row: dict[str, Any] = {"model": model, "step": name, "error": outcome.short_error}
        if outcome.ok:
            row |= asdict(outcome.value)
            row["difference"] = trainings.largest_difference(outcome.value.losses, references[reference].losses)
            if reference == "plain_cpu":
                row["to_constant_rate"] = trainings.largest_difference(outcome.value.losses, constant.losses)
        measured.append(row)
    return measured


def table_of(measured: list[dict[str, Any]]) -> str:
    """The rows as a table, followed by errors."""
    names = ("model", "step", "executions", "compiles", "transfers", "host_ms", "wall_ms", "difference")
    headers = ("model", "step", "launches", "compiles in all", "transfers", "host ms", "wall ms", "difference")
    text = report.table(headers, [[row.get(name) for name in names] for row in measured])
    return "\n".join([text, *(f"  {row['model']}, {row['step']}: {row['error']}" for row in measured if row["error"])])


def add_targets(made: report.Report, measured: list[dict[str, Any]]) -> None:
    """Adds our targets; a run that crashed misses all of them."""
    eager = {row["model"]: row.get("host_ms") for row in measured if row["step"] == _EAGER}
    for row in measured:
        if row["step"] not in _OURS:
            continue
        name = f"{row['model']}, {row['step']}"
        made.target(f"{name}: launches per step", row.get("executions"), "exactly", 1)
        made.target(f"{name}: compiles in all", row.get("compiles"), "exactly", 1)
        made.target(f"{name}: difference of losses", row.get("difference"), "at most", _EXACT)
        if row["step"] == _REPLAYED:
            own, of_eager = row.get("host_ms"), eager[row["model"]]
            part = own / of_eager if own is not None and of_eager else None
            made.target(f"{name}: host time, of eager's", part, "at most", _OF_EAGER)
            # A learning rate that stayed a constant of the executable would give these losses.
            made.target(f"{name}: difference to a constant rate", row.get("to_constant_rate"), "at least", 20 * _EXACT)


def main(command: list[str] | None = None) -> int:
    """The program."""
    parser = report.parser(str(__doc__).splitlines()[0])
    parser.add_argument("--models", default="GPT-2,Llama", metavar="NAMES", help="comma-separated")
    parser.add_argument("--steps", type=int, default=20, help="at least 8")
    parser.add_argument("--timeout", type=float, default=300, help="seconds per run")
    options = parser.parse_args(command)
    if (reason := stand_in.reason_to_skip()) is not None:
        parser.error(reason)
    made = report.Report("torch_tpu", settings={"steps": options.steps})
    measured = made.results["rows"] = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(stand_in.environment(Path(folder)))
        stand_in.start()
        for model in options.models.split(","):
            measured += measure(model, options.steps, options.timeout)
            made.save(options)
    add_targets(made, measured)
    print(str(__doc__).split("\n\n", 1)[1])
    print(table_of(measured))
    return made.finish(options)


if __name__ == "__main__":
    sys.exit(main())
