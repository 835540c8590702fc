"""The communication volume of sharded steps: templates and `auto_sharding`; `python -m benchmarks.sharding`.

For each model, width and memory cap, on 8 CPU devices: `dp`, `fsdp`, `tp` and `2d` (on every mesh that suits them, with
our norms and attention) and the automatic plan. Each training step (AdamW, float32) is compiled but not executed. The
bytes that each device sends per step, and the memory it needs, are read from the optimised HLO.

A cap is a multiple of the fully sharded state (parameters, gradients, Adam's averages: 16 bytes per parameter, divided
by the number of devices), plus the memory of the `fsdp` step besides its state, so that `fsdp` fits at 1.0. `by hand`
is the template with the smallest volume of those that fit.

At the end, the planning time by depth of the model.
"""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

DEVICES = 8
os.environ.setdefault("PJRT_DEVICE", "CPU")
os.environ.setdefault("CPU_NUM_DEVICES", str(DEVICES))

from benchmarks import report  # noqa: E402
from benchmarks.sizes import TO_SHARD, to_shard  # noqa: E402
from hf_trainer.patches import as_if_compiling  # noqa: E402
from xla_adapters.errors import ConfigError  # noqa: E402
from xla_adapters.sharding import (  # noqa: E402
    MEASURED_PLANS,
    Mesh,
    ShardingConfig,
    ShardingPlan,
    make_plan,
    template,
)
from xla_adapters.sharding.automatic import measured, state_bytes  # noqa: E402
from xla_adapters.sharding.measure import PlanCache, compiler_for  # noqa: E402
from xla_adapters.sharding.planner import Planner, Topology, meshes_of  # noqa: E402

WIDTHS, CAPS, DEPTHS = "128,256,512", "1.1,1.3,2,none", "2,8,32,64"
RECIPES = (
    ("dp", (8, 1)),
    ("fsdp", (8, 1)),
    ("tp", (1, 8)),
    ("2d", (4, 2)),
    ("2d", (2, 4)),
)


@dataclass(frozen=True, kw_only=True)
class Step:
    """A compiled step: megabytes (1e6 bytes) per device that it sends (`wire`) and needs in memory."""

    name: str
    wire: float
    memory: float
    predicted_wire: float | None = None
    predicted_memory: float | None = None


@dataclass(frozen=True, kw_only=True)
class Row:
    """One model, width and cap."""

    model: str
    width: int
    cap: str
    budget: float | None
    by_hand: Step | None
    auto: Step | None
    seconds: float
    error: str = ""

    @property
    def ratio(self) -> float | None:
        """Volume of the automatic plan divided by that of the best template that fits; None if either is missing."""
        return None if self.by_hand is None or self.auto is None else self.auto.wire / self.by_hand.wire


def _row(written: dict[str, Any]) -> Row:
    """Reads a row that `--json` wrote."""
    values = {name: value for name, value in written.items() if name != "ratio"}
    steps = {name: None if values[name] is None else Step(**values[name]) for name in ("by_hand", "auto")}
    return Row(**{**values, **steps})


def compiled_templates(model: Any, batch: Any, kept: PlanCache) -> list[Step]:
    """Compiles every template."""
    plans = [template(name, model, Mesh.data_and_model(*shape)) for name, shape in RECIPES]
    found = measured(plans, model, batch, Topology.preset("cpu"), as_if_compiling, kept, compiler_for("cpu", DEVICES))
    if len(found) < len(plans):
        raise RuntimeError("a template could not be compiled; the log says why")
    return [_step(candidate.plan) for candidate in found]


def compile_together(model: Any, batch: Any, budgets: list[float | None], kept: PlanCache) -> None:
    """Compiles in one process what the automatic plans for these budgets want first: each would start its own."""
    planner = Planner.begin(model, batch, topology=Topology.preset("cpu"), around=as_if_compiling)
    plans: list[ShardingPlan] = [template(name, model, Mesh.data_and_model(*shape)) for name, shape in RECIPES]
    for budget in budgets:
        try:
            limit = None if budget is None else int(budget * 1e6)
            plans += planner.best(meshes_of(None, DEVICES), limit, given=False)[:MEASURED_PLANS]
        except ConfigError:
            # No plan is predicted to fit; only the templates are compiled.
            continue
    measured(plans, model, batch, Topology.preset("cpu"), as_if_compiling, kept, compiler_for("cpu", DEVICES))


def _step(plan: ShardingPlan) -> Step:
    assert plan.measured is not None
    predicted = plan.predicted
    return Step(
        name=f"{plan.name} {'x'.join(map(str, plan.mesh.shape))}",
        wire=plan.measured.wire_bytes / 1e6,
        memory=plan.measured.memory_bytes / 1e6,
        predicted_wire=None if predicted is None else predicted.wire_bytes / 1e6,
        predicted_memory=None if predicted is None else predicted.memory_bytes / 1e6,
    )


def automatic(model: Any, batch: Any, budget: float | None, folder: Path) -> Step:
    """The step that `auto_sharding=True` chooses, with this memory budget in megabytes."""
    config = ShardingConfig(memory_budget=None if budget is None else int(budget * 1e6))
    plan = make_plan(model, config, DEVICES, example=lambda: batch, around=as_if_compiling, folder=folder)
    return _step(plan)


def rows_of(model_name: str, width: int, caps: list[str]) -> tuple[list[Row], list[Step]]:
    """One model at one width, under each cap."""
    model, batch = to_shard(model_name, width=width)
    state = sum(state_bytes(parameter, DEVICES) for parameter in model.parameters()) / 1e6
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        kept = PlanCache(Path(folder))
        hand = compiled_templates(model, batch, kept)
        (fsdp,) = [step for step in hand if step.name.startswith("fsdp")]
        rest = max(0.0, fsdp.memory - state)
        budgets = {cap: None if cap == "none" else float(cap) * state + rest for cap in caps}
        compile_together(model, batch, list(budgets.values()), kept)
        for cap, budget in budgets.items():
            fitting = [step for step in hand if budget is None or step.memory <= budget]
            best = min(fitting, key=lambda step: step.wire, default=None)
            begun = time.monotonic()
            auto, error = None, ""
            try:
                auto = automatic(model, batch, budget, Path(folder))
            except ConfigError as refusal:
                error = str(refusal)
            rows.append(
                Row(
                    model=model_name,
                    width=width,
                    cap=cap,
                    budget=budget,
                    by_hand=best,
                    auto=auto,
                    seconds=time.monotonic() - begun,
                    error=error,
                )
            )
            print(f"  {model_name} {width}, cap {cap}: {rows[-1].seconds:.0f} s {error}", flush=True)
    return rows, hand


def planning_time(depth: int) -> float:
    """Seconds to plan a Llama of this depth: captured, all meshes of 8 devices, nothing compiled."""
    model, batch = to_shard("llama", width=256, layers=depth)
    begun = time.monotonic()
    planner = Planner.begin(model, batch, topology=Topology.preset("cpu"), around=as_if_compiling)
    planner.best(meshes_of(None, DEVICES), None, given=False)
    return time.monotonic() - begun


def table_of(rows: list[Row]) -> str:
    """MB per device and step."""

    def of(step: str, figure: str) -> Callable[[Row], object]:
        return lambda row: getattr(getattr(row, step), figure, None)

    shown: dict[str, str | Callable[[Row], object]] = {"model": "model", "width": "width", "cap": "cap", "MB": "budget"}
    shown |= {"by hand": of("by_hand", "name"), "sent by it": of("by_hand", "wire"), "kept": of("by_hand", "memory")}
    shown |= {"auto": of("auto", "name"), "sent": of("auto", "wire"), "said": of("auto", "predicted_wire")}
    shown |= {"kept by it": of("auto", "memory"), "said of that": of("auto", "predicted_memory")}
    return report.table_of(rows, {**shown, "ratio": "ratio", "s": "seconds"})


def targets(made: report.Report, rows: list[Row]) -> None:
    """Adds the targets: within the cap, never above the best template, 0.8 of it on average, predictions within 10%."""
    feasible = [row for row in rows if row.by_hand is not None]
    planned = [row for row in feasible if row.auto is not None]
    refused = len(feasible) - len(planned)
    over = sum(row.budget is not None and row.auto.memory > row.budget * (1 + 1e-9) for row in planned)  # type: ignore[union-attr]
    ratios = [row.ratio for row in planned if row.ratio is not None]
    near = [
        abs(row.auto.predicted_wire - row.auto.wire) <= 0.1 * row.auto.wire  # type: ignore[operator, union-attr]
        for row in planned
    ]
    made.target("caps that a template fits and auto refuses", refused, "exactly", 0)
    made.target("plans above their cap", over, "exactly", 0)
    made.target("communication volume, auto : best template, the worst", max(ratios, default=None), "at most", 1.0)
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else None
    made.target("communication volume, auto : best template, geometric mean", mean, "at most", 0.8)
    made.target("predicted within 10% of measured, of all", sum(near) / len(near) if near else None, "at least", 0.9)


def main(arguments: list[str] | None = None) -> int:
    """Runs the program; returns its exit status."""
    parser = report.parser(__doc__ or "")
    parser.add_argument("--models", default=",".join(TO_SHARD), help="comma-separated (all)")
    parser.add_argument("--widths", default=WIDTHS, help=f"of the hidden states ({WIDTHS})")
    parser.add_argument("--caps", default=CAPS, help=f"multiples of the fully sharded state ({CAPS})")
    parser.add_argument("--join", type=Path, nargs="+", default=[], help="files of --json whose rows count too")
    parser.add_argument("--depths", default=DEPTHS, help=f"to time the planner with; empty for none ({DEPTHS})")
    options = parser.parse_args(arguments)
    made = report.Report("sharding", settings={name: str(value) for name, value in vars(options).items()})
    rows: list[Row] = []
    hand: dict[str, list[dict[str, Any]]] = {}
    made.results = {"rows": [], "by hand": hand}

    def count(found: list[Row]) -> None:
        rows.extend(found)
        made.results["rows"] += [{**asdict(row), "ratio": row.ratio} for row in found]

    for file in options.join:
        results = json.loads(file.read_text())["results"]
        hand.update(results["by hand"])
        count([_row(written) for written in results["rows"]])
    for name in filter(None, options.models.split(",")):
        for width in map(int, options.widths.split(",")):
            found, steps = rows_of(name, width, options.caps.split(","))
            hand[f"{name} {width}"] = [asdict(step) for step in steps]
            count(found)
            made.save(options)
    print(table_of(rows))
    depths = [(depth, planning_time(depth)) for depth in map(int, filter(None, options.depths.split(",")))]
    if depths:
        print(report.table(("layers", "seconds to plan"), depths))
    made.results["depths"] = depths
    targets(made, rows)
    return made.finish(options)


if __name__ == "__main__":
    sys.exit(main())
