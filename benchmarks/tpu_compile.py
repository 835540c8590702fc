"""Which architectures of transformers compile for TPUs; `python -m benchmarks.tpu_compile` (extra `preflight`).

The training step of each (a tiny config; forward, loss, backward, AdamW; FSDP over the slice) is traced without memory,
in its own process, and compiled by libtpu. Nothing is run.
"""

from __future__ import annotations

import functools
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from benchmarks import report, zoo
from hf_trainer.patches import as_if_compiling
from tests.children import run_in_child
from xla_adapters import get_runtime
from xla_adapters.sharding import default_mesh, template
from xla_adapters.tools.preflight import InBfloat16
from xla_adapters.tools.step_capture import TracedStep
from xla_adapters.tools.tpu_compiler import Target, compile_module
from xla_adapters.tools.trace_process import OneStep, Request
from xla_adapters.tools.trace_process import trace as trace_training

WANTED = 38


@dataclass
class Row:
    """One line of the table: an architecture on a slice. Sizes are bytes on one device."""

    name: str
    topology: str
    compiler: str = ""
    arguments: int | None = None
    temporaries: int | None = None
    sent: float | None = None
    trace_seconds: float | None = None
    compile_seconds: float | None = None
    reason: str | None = None

    @property
    def ok(self) -> bool:
        """Whether there is a program."""
        return self.reason is None


def trace(architecture: zoo.Architecture, devices: int, bf16: bool) -> TracedStep:
    """Runs in a child."""
    get_runtime().device.initialize(spmd=True)
    model = architecture.build()
    model.train()
    (batch,) = architecture.batches(1)
    plan = template("fsdp", model, default_mesh("fsdp", devices))
    around = InBfloat16(as_if_compiling) if bf16 else as_if_compiling
    step = OneStep(plan=plan, around=around)
    with tempfile.TemporaryDirectory() as folder:
        request = Request(generation="v5e", spmd=True)
        found = trace_training(Path(folder), lambda hand: step(model, dict(batch), hand), request)
    if found.problem:
        raise RuntimeError(found.problem)
    return found.steps[0]


def measure(architecture: zoo.Architecture, target: Target, timeout: float, bf16: bool) -> Row:
    """Traces in a child, compiles in another; whatever goes wrong there stands in the row."""
    row = Row(architecture.name, str(target))
    environment = {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(target.devices)}
    traced = run_in_child(
        functools.partial(trace, architecture, target.devices, bf16), timeout=timeout, env=environment
    )
    if not traced.ok:
        row.reason = f"not traced: {traced.short_error}"
        return row
    compiled = compile_module(traced.value.module, target, timeout=timeout)
    row.compiler, row.trace_seconds, row.compile_seconds = compiled.compiler, traced.seconds, compiled.seconds
    if compiled.memory is None or compiled.collectives is None:
        row.reason = f"not compiled: {compiled.problem}"
        return row
    row.arguments, row.temporaries = compiled.memory.arguments, compiled.memory.temporaries
    row.sent = compiled.collectives.wire_bytes
    return row


def table_of(rows: list[Row]) -> str:
    """The rows for a person; reasons stand below, they are long."""
    shown = {"architecture": "name", "topology": "topology", "ok": "ok", "arguments": "arguments", "sent": "sent"}
    shown |= {"temporaries": "temporaries", "trace s": "trace_seconds", "compile s": "compile_seconds"}
    failed = [f"  {row.name} on {row.topology}: {row.reason}" for row in rows if not row.ok]
    text = report.table_of(rows, shown)
    return text + ("\n\nnot ok, and why:\n" + "\n".join(failed) if failed else "")


def main(command: list[str] | None = None) -> int:
    """The program."""
    parser = report.parser(str(__doc__))
    parser.add_argument("--only", default="", metavar="NAMES", help="comma-separated parts of names")
    parser.add_argument("--topologies", default="v5e:2x2,v6e:2x2", help="comma-separated slices")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for tracing, and for compiling")
    parser.add_argument("--at-least", type=int, default=WANTED, help="how many must compile for each slice")
    parser.add_argument("--bf16", action="store_true", help="under bfloat16 autocast")
    options = parser.parse_args(command)
    chosen = zoo.named(options.only)
    for architecture in chosen:
        architecture.load_classes()
    targets = [Target.parse(name) for name in options.topologies.split(",")]
    made = report.Report("tpu_compile", settings={"topologies": options.topologies, "bf16": options.bf16})
    rows = report.measured(
        made,
        options,
        [(architecture, target) for target in targets for architecture in chosen],
        lambda pair: measure(*pair, options.timeout, options.bf16),
        name=lambda row: f"{row.name} on {row.topology}",
        state=lambda row: "ok" if row.ok else row.reason,
        verdict=lambda row: {"ok": row.ok},
    )
    for target in targets:
        good = sum(row.ok for row in rows if row.topology == str(target))
        made.target(f"architectures that compile for {target}", good, "at least", options.at_least)
    print(f"{len(chosen)} architectures, {'bfloat16 autocast' if options.bf16 else 'float32'}\n")
    print(table_of(rows))
    return made.finish(options)


if __name__ == "__main__":
    sys.exit(main())
