"""What the TPU compiler makes of plans at real sizes; `python -m benchmarks.preflight` (extra `preflight`).

For each model and slice: the templates `dp`, `fsdp`, `tp` and `2d` (on every mesh that suits it), the planner's best
plans, and which of them `auto_sharding` with `measure_top_k` takes (`*`). The training step (AdamW) of each is traced
without memory and compiled by libtpu, up to where code would be generated; nothing is run. Bytes that a device sends,
and needs in memory (without code), are those of the compiled program. The time of a step is predicted computing, and
those bytes over the bandwidth of the links. `said` is the planner's prediction. A template whose parameters and
optimizer state alone are larger than a device's memory is not compiled.

With --architectures, the tiny models of `benchmarks.zoo` instead, under FSDP; --bf16 traces them under bfloat16
autocast. Those that do not compile are listed with the reason.

`--predict` compiles nothing, and needs no libtpu: what the planner picks for each model and slice, and the bytes that
it predicts on a device. `--rows-each` and `--gradient-checkpointing` belong to it.

Compiles take minutes. Results are kept in `--folder`, so that a run that was stopped, or runs for single `--models` and
`--topologies`, can be put together by another.
"""

from __future__ import annotations

import functools
import json
import math
import os
import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("PJRT_DEVICE", "CPU")

import torch

from benchmarks import report, zoo
from benchmarks.sizes import REAL_SIZES, of_real_size
from hf_trainer.patches import as_if_compiling
from tests.children import run_in_child
from xla_adapters import get_runtime
from xla_adapters.errors import ConfigError
from xla_adapters.sharding import (
    MEASURED_PLANS,
    ShardingConfig,
    ShardingPlan,
    checkpoint_activations,
    default_mesh,
    make_plan,
    template,
)
from xla_adapters.sharding.measure import PlanCompiler, PlanResult, digest_of_step, register
from xla_adapters.tools.preflight import InBfloat16, measure_for_tpu, plan_compiler
from xla_adapters.tools.step_capture import TracedStep
from xla_adapters.tools.tpu_compiler import Compiler, Target, compile_module
from xla_adapters.tools.trace_process import OneStep, Request, trace

TOPOLOGIES = "v4:2x2x2,v5e:2x4,v5p:2x2x2,v6e:2x4"
# Architectures that compile for each slice, of 39.
WANTED = 38


@dataclass
class Row:
    """A plan of a model on a slice. Sizes are bytes on one device."""

    model: str
    topology: str
    plan: str
    mesh: str
    chosen: bool
    fits: bool
    memory: float | None = None
    predicted_memory: float | None = None
    sent: float | None = None
    predicted_sent: float | None = None
    by_kind: dict[str, float] = field(default_factory=dict)
    step_seconds: float | None = None
    compile_seconds: float | None = None
    remark: str = ""

    @property
    def memory_ratio(self) -> float | None:
        """Predicted : compiled."""
        return self.predicted_memory / self.memory if self.memory and self.predicted_memory else None


class Recorder:
    """Compiles plans with libtpu, and keeps each result in a file as soon as it is known.

    Args:
        folder: of the files.
        timeout: seconds for each plan to be traced, and for each to be compiled.
    """

    def __init__(self, folder: Path, timeout: float) -> None:
        self._folder, self._timeout = folder, timeout
        self.seen: dict[tuple[str, str], PlanResult] = {}
        folder.mkdir(parents=True, exist_ok=True)

    def compiler(self, topology: str, devices: int) -> PlanCompiler:
        """As `plan_compiler`."""
        inner = plan_compiler(topology, devices)

        def measure(
            model: torch.nn.Module,
            batch: Any,
            plans: Sequence[ShardingPlan],
            *,
            around: Callable[[], AbstractContextManager[Any]],
        ) -> list[PlanResult]:
            digests = [digest_of_step(model, batch, plan, inner.name) for plan in plans]
            missing = [
                (plan, self._path(digest))
                for plan, digest in zip(plans, digests, strict=True)
                if not self._path(digest).is_file()
            ]
            if missing:
                todo = tuple(plan for plan, _ in missing)
                target = Target.parse(topology)
                found = measure_for_tpu(model, batch, todo, around=around, target=target, timeout=self._timeout)
                for (plan, path), result in zip(missing, found, strict=True):
                    said = result.problem or f"{result.seconds:.0f} s"
                    print(f"  {topology} {plan.name} on {plan.mesh}: {said}", file=sys.stderr, flush=True)
                    path.write_text(json.dumps(asdict(result), indent=1))
            results = [PlanResult.from_values(json.loads(self._path(digest).read_text())) for digest in digests]
            self.seen.update({_key(plan): result for plan, result in zip(plans, results, strict=True)})
            return results

        return PlanCompiler(name=inner.name, measure=measure)

    def _path(self, digest: str) -> Path:
        return self._folder / f"{digest}.json"


def _key(plan: ShardingPlan) -> tuple[str, str]:
    """What an `Alternative` says of its plan: its name, mesh and prediction."""
    wire = plan.predicted.wire_bytes if plan.predicted is not None else 0.0
    return plan.name, f"{plan.mesh} {wire}"


def rows_of(name: str, options: Any, topology: str, recorder: Recorder) -> list[Row]:
    """Plans, compiles and compares one model on one slice."""
    target = Target.parse(topology)
    model, batch = of_real_size(name, options.layers)
    model.to(getattr(torch, options.dtype))
    config = ShardingConfig(topology=topology, measure_top_k=options.top)
    try:
        plan = make_plan(model, config, target.devices, example=lambda: batch, around=as_if_compiling)
    except ConfigError as error:
        return [Row(name, topology, "auto", "", True, False, remark=str(error))]
    rows, (chosen, *_) = [], [_key(plan)]
    for item in plan.alternatives:
        key = (item.name, f"{item.mesh} {item.predicted_wire_bytes}")
        result = recorder.seen.get(key)
        measured = item.measured
        rows.append(
            Row(
                model=name,
                topology=topology,
                plan=item.name,
                mesh=item.mesh,
                chosen=key == chosen,
                fits=measured is not None and not item.remark,
                memory=None if measured is None else measured.memory_bytes,
                predicted_memory=item.predicted_memory_bytes,
                sent=None if measured is None else measured.wire_bytes,
                predicted_sent=item.predicted_wire_bytes,
                by_kind=_by_kind(result),
                step_seconds=None if measured is None else item.seconds,
                compile_seconds=None if result is None else result.seconds,
                remark=item.remark,
            )
        )
    return rows


def traced(model: zoo.Model, devices: int, bf16: bool) -> TracedStep:
    """Runs in a child."""
    get_runtime().device.initialize(spmd=True)
    net = model.seeded().train()
    plan = template("fsdp", net, default_mesh("fsdp", devices))
    step = OneStep(plan=plan, around=InBfloat16(as_if_compiling) if bf16 else as_if_compiling)
    with tempfile.TemporaryDirectory() as folder:
        request = Request(generation="v5e", spmd=True)
        found = trace(Path(folder), lambda hand: step(net, model.batches(1)[0], hand), request)
    if found.problem:
        raise RuntimeError(found.problem)
    return found.steps[0]


def rows_of_tiny(model: zoo.Model, options: Any, topology: str, recorder: Recorder | None) -> list[Row]:
    """Compiles one of the tiny models on one slice, under FSDP."""
    target = Target.parse(topology)
    row = Row(model.name, topology, "fsdp", f"{target.devices} devices", True, False)
    here = {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(target.devices)}
    step = functools.partial(traced, model, target.devices, options.bf16)
    outcome = run_in_child(step, timeout=options.timeout, env=here)
    if not outcome.ok:
        row.remark = f"not traced: {outcome.short_error}"
        return [row]
    compiled = compile_module(outcome.value.module, target, timeout=options.timeout)
    row.compile_seconds, row.remark = outcome.seconds + compiled.seconds, compiled.problem
    if compiled.memory is not None and compiled.collectives is not None:
        row.fits, row.memory, row.sent = True, compiled.memory.needed, compiled.collectives.wire_bytes
    return [row]


def _by_kind(result: PlanResult | None) -> dict[str, float]:
    found: dict[str, float] = {}
    for item in result.collectives if result is not None else ():
        found[item.kind] = found.get(item.kind, 0.0) + item.wire_bytes
    return found


def table_of(rows: list[Row]) -> str:
    """The rows for a person, in GB and MB."""

    def scaled(figure: str, unit: float) -> Callable[[Row], object]:
        return lambda row: None if getattr(row, figure) is None else getattr(row, figure) / unit

    def kinds(row: Row) -> str:
        found = sorted(row.by_kind.items(), key=lambda item: -item[1])
        return ", ".join(f"{kind} {size / 1e6:,.0f}" for kind, size in found) or row.remark

    shown: dict[str, str | Callable[[Row], object]] = {"model": "model", "slice": "topology"}
    shown |= {"plan": lambda row: row.plan + (" *" if row.chosen else ""), "mesh": "mesh", "fits": "fits"}
    shown |= {"GB": scaled("memory", 1e9), "said": scaled("predicted_memory", 1e9), "MB sent": scaled("sent", 1e6)}
    shown |= {"MB said": scaled("predicted_sent", 1e6), "step ms": scaled("step_seconds", 1e-3)}
    return report.table_of(rows, {**shown, "trace and compile s": "compile_seconds", "sent by": kinds})


def targets(made: report.Report, rows: list[Row]) -> None:
    """Adds the targets: ours fits wherever any does, sends at most 0.9 of the best template, memory within 10%."""
    cells: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        cells.setdefault((row.model, row.topology), []).append(row)
    refused, ratios = 0, []
    for cell in cells.values():
        hand = [row for row in cell if row.plan not in ("planner", "auto") and row.fits]
        ours = next((row for row in cell if row.chosen and row.fits), None)
        refused += ours is None and any(row.fits for row in cell)
        least = min((row.sent for row in hand if row.sent), default=None)
        if ours is not None and ours.sent is not None and least is not None:
            ratios.append(ours.sent / least)
    near = [abs(row.memory_ratio - 1) <= 0.1 for row in rows if row.memory_ratio is not None]
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else None
    made.target("cells where something fits and ours does not", refused, "exactly", 0)
    made.target("sent, ours : best template that fits, geometric mean", mean, "at most", 0.9)
    made.target("the same, the worst", max(ratios, default=None), "at most", 1.02)
    made.target("memory predicted within 10%, of all", sum(near) / len(near) if near else None, "at least", 0.9)


@dataclass
class Prediction:
    """What the planner picks for a model on a slice. Sizes are bytes on one device.

    Attributes:
        plan: its name and mesh; None if no plan fits.
        memory: of the plan; if none fits, the least that any takes.
        rows: of the batch, on all devices together.
    """

    model: str
    topology: str
    rows: int
    plan: str | None
    memory: float

    def __str__(self) -> str:
        size = f"{self.memory / 1e9:.1f} GB"
        return f"no ({size})" if self.plan is None else f"{self.plan}, {size}"


def predicted(name: str, topology: str, options: Any) -> Prediction:
    """What the planner picks, without a compile."""
    devices = Target.parse(topology).devices
    size = REAL_SIZES[name]
    rows = size.batch if options.rows_each is None else options.rows_each * devices
    model, batch = of_real_size(name, options.layers, rows)
    model.to(getattr(torch, options.dtype))
    if options.gradient_checkpointing:
        checkpoint_activations(model)
    config = ShardingConfig(topology=topology, measure_top_k=0)
    try:
        plan = make_plan(model, config, devices, example=lambda: batch, around=as_if_compiling)
    except ConfigError as error:
        least = re.search(r"smallest that any plan for \d+ devices takes is (\d+) bytes", str(error))
        if least is None:
            raise
        return Prediction(name, topology, rows, None, float(least[1]))
    assert plan.predicted is not None
    mesh = "x".join(map(str, plan.mesh.shape))
    return Prediction(name, topology, rows, f"{plan.name} {mesh}", plan.predicted.memory_bytes)


def predict(made: report.Report, options: Any) -> int:
    """Predicts each cell, and prints them as a table of models and slices."""
    slices, cells = options.topologies.split(","), {}
    for name in options.models.split(","):
        for topology in slices:
            cells[name, topology] = predicted(name, topology, options)
            made.results["cells"] = [asdict(cell) for cell in cells.values()]
            made.save(options)
    names = dict.fromkeys(name for name, _ in cells)
    print(report.markdown(["model", *slices], [[name, *(str(cells[name, each]) for each in slices)] for name in names]))
    return made.finish(options)


def main(command: list[str] | None = None) -> int:
    """The program."""
    parser = report.parser(str(__doc__))
    parser.add_argument("--architectures", nargs="?", const="", help="comma-separated parts of names; all if none")
    parser.add_argument("--bf16", action="store_true", help="architectures under bfloat16 autocast")
    parser.add_argument("--models", default=",".join(REAL_SIZES), help=f"comma-separated ({','.join(REAL_SIZES)})")
    parser.add_argument("--topologies", default=TOPOLOGIES, help=f"comma-separated slices ({TOPOLOGIES})")
    parser.add_argument("--layers", type=int, default=0, help="of each model, instead of those of its real size")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"), help="of parameters (float32)")
    parser.add_argument("--top", type=int, default=MEASURED_PLANS, help=f"of the planner's plans ({MEASURED_PLANS})")
    parser.add_argument("--timeout", type=float, default=900, help="seconds to trace, and to compile, each plan (900)")
    parser.add_argument("--predict", action="store_true", help="compile nothing: what the planner picks")
    parser.add_argument("--rows-each", type=int, help="rows of the batch for each device, instead of a batch for all")
    parser.add_argument("--gradient-checkpointing", action="store_true", help="keep one activation per layer")
    parser.add_argument("--folder", type=Path, help="keeps results, for the next run (a temporary one)")
    options = parser.parse_args(command)
    made = report.Report("preflight", settings={name: str(value) for name, value in vars(options).items()})
    if options.predict:
        return predict(made, options)
    made.settings["libtpu"] = Compiler.find().version
    rows: list[Row] = []
    if tiny := [] if options.architectures is None else zoo.named(options.architectures):
        chosen = {model.name: functools.partial(rows_of_tiny, model, options) for model in tiny}
    else:
        chosen = {name: functools.partial(rows_of, name, options) for name in options.models.split(",")}
    with tempfile.TemporaryDirectory() as temporary:
        recorder = Recorder(options.folder or Path(temporary), options.timeout)
        register(recorder.compiler)
        for topology in options.topologies.split(","):
            for name, plan_and_compile in chosen.items():
                print(f"{name} on {topology}", file=sys.stderr, flush=True)
                rows += plan_and_compile(topology, recorder)
                made.results["rows"] = [asdict(row) | {"memory_ratio": row.memory_ratio} for row in rows]
                made.save(options)
    print(table_of(rows))
    if not tiny:
        targets(made, rows)
    for topology in options.topologies.split(",") if tiny else ():
        good = sum(row.fits for row in rows if row.topology == topology)
        made.target(f"architectures that compile for {topology}", good, "at least", min(WANTED, len(tiny)))
    return made.finish(options)


if __name__ == "__main__":
    sys.exit(main())
