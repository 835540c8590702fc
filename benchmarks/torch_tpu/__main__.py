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
import secrets
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import report
from tests.children import run_in_child
from tests.torch_tpu import stand_in
from tests.torch_tpu.ranks import outcomes_on_ranks

_EXACT = 1e-5
_OF_EAGER = 1 / 20
_EAGER, _REPLAYED, _OUR_TRAINER = "TorchTPU, eager", "xla_adapters.CompiledStep", "hf_trainer.Trainer"
_SCHEMES = ("dp", "fsdp")
_OURS = ("xla_adapters.step()", _REPLAYED, _OUR_TRAINER)


def rows() -> list[tuple[str, str, str]]:
    """What is measured: name, function of `trainings`, and the function of the training it is compared with."""
    return [
        ("transformers.Trainer, device set by hand", "stock_trainer", "trainer_on_cpu"),
        (_EAGER, "eager", "plain_cpu"),
        ("TorchTPU, fused eager", "fused_eager", "plain_cpu"),
        ("torch.compile of the whole step", "compiled", "plain_cpu"),
        ("SingleTraceTrainer (constant rate, no clipping)", "single_trace", "plain_cpu"),
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


def measure_ranks(model: str, steps: int, timeout: float, count: int) -> list[dict[str, Any]]:
    """All rows of one model on several ranks; launches are those of one of them, compiles those of all."""
    from benchmarks.torch_tpu import trainings

    def run(how: str, **options: bool) -> list[Any]:
        train = functools.partial(trainings.on_rank, model, 2 if "counts_bytes" in options else steps, how, **options)
        # Programs that another run has compiled would not be compiled.
        fresh = {"TORCH_TPU_TIER2_COMPILATION_CACHE": secrets.token_hex(8), "XLA_ADAPTERS_CACHE_DIR": "off"}
        found = outcomes_on_ranks(count, train, timeout=timeout, env=fresh)
        error = next((outcome.short_error for outcome in found if not outcome.ok), None)
        print(f"{model}, {count} ranks, {how} {options}: {error or 'done'}", file=sys.stderr, flush=True)
        return [error, *(outcome.value for outcome in found)]

    reference = run_in_child(functools.partial(trainings.plain_cpu, model, steps), timeout=timeout).value
    measured = []
    for how in ("DDP", "FSDP2", *_SCHEMES):
        sent = run(how, counts_bytes=True)[1]
        for compiles in (False, True) if how not in _SCHEMES else (False,):
            error, *ranks = run(how, compiles=compiles)
            name = f"{how}{', torch.compile of the whole step' if compiles else ''}"
            row: dict[str, Any] = {"model": model, "step": name, "ranks": count, "error": error}
            if error is None:
                losses = [sum(each) / count for each in zip(*(rank.losses for rank in ranks), strict=True)]
                row |= asdict(ranks[0]) | {"compiles": sum(rank.compiles for rank in ranks), "sent_mb": sent.sent_mb}
                row["difference"] = trainings.largest_difference(losses, reference.losses)
            measured.append(row)
    return measured


def table_of(measured: list[dict[str, Any]]) -> str:
    """The rows as a table, followed by errors."""
    names = ("model", "step", "executions", "compiles", "transfers", "host_ms", "sent_mb", "difference")
    headers = ("model", "step", "launches", "compiles in all", "transfers", "host ms", "MB sent", "difference")
    text = report.table(headers, [[row.get(name) for name in names] for row in measured])
    return "\n".join([text, *(f"  {row['model']}, {row['step']}: {row['error']}" for row in measured if row["error"])])


def add_targets(made: report.Report, measured: list[dict[str, Any]]) -> None:
    """Adds our targets; a run that crashed misses all of them."""
    eager = {row["model"]: row.get("host_ms") for row in measured if row["step"] == _EAGER}
    for row in measured:
        if row["step"] not in (*_OURS, *_SCHEMES):
            continue
        name = f"{row['model']}, {row['step']}"
        made.target(f"{name}: launches per step", row.get("executions"), "exactly", 1)
        # Ranks share a cache: one may find what another has compiled.
        kind = "at most" if "ranks" in row else "exactly"
        made.target(f"{name}: compiles in all", row.get("compiles"), kind, row.get("ranks", 1))
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
    parser.add_argument("--ranks", type=int, default=1, metavar="N", help="on so many ranks: 2, 4 or 8")
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
            if options.ranks > 1:
                measured += measure_ranks(model, options.steps, options.timeout, options.ranks)
            else:
                measured += measure(model, options.steps, options.timeout)
            made.save(options)
    add_targets(made, measured)
    print(str(__doc__).split("\n\n", 1)[1])
    print(table_of(measured))
    return made.finish(options)


if __name__ == "__main__":
    sys.exit(main())
