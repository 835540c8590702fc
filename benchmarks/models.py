"""Training throughput of several models, ours and peers; `python -m benchmarks.models`.

One step is forward, loss, backward, clipping and AdamW, float32, in a hand-written loop. The runs alternate in blocks
of steps, each in its own process:
  ours            CompiledStep;
  CompiledStep+dynamo   the same with a model that torch.compile compiled, as under xla_mode="eager+dynamo";
  lazy loop       torch_xla.sync() at each step;
  openxla+lazy, +compile, +dynamo   forward and backward by torch.compile(backend="openxla"); the update
                  lazily, in torch_xla.compile, or by dynamo too: the best counts;
  plain CPU       torch without XLA, its update fused;
  inductor        the same with torch.compile around model and loss.
Rows per second of wall time, medians over the blocks; "to X" is ours divided by X. The target is to be faster than the
XLA peers; the table also shows whether XLA or torch's kernels are faster on this CPU. "runs" are executions per step of
ours, of it with dynamo, and of the best openxla.

The run with dynamo must be the same step as ours: one compile, one execution per step, equal losses. Under
--no-dropout the losses of both are compared with the plain CPU's, too, over the first steps (rounding grows in later
ones). "off by" is the largest difference of a loss, relative for losses above 1. Only chosen runs have targets.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, replace

import numpy as np

from benchmarks import report
from benchmarks.harness import Plan
from benchmarks.runs import Found, add_options, chosen, divided, measure
from benchmarks.sizes import VIT, Size
from benchmarks.timed_loops import CPU, INDUCTOR, INLINED, LAZY, OPENXLA, STEP

RUNS = (STEP, INLINED, LAZY, *OPENXLA, CPU, INDUCTOR)
# Steps whose losses are compared with the CPU's, and how far they may be off.
COMPARED, LOSS_LIMIT = 3, 1e-3


def _transformer(family: str) -> Size:
    """Between those of the tests and those people train on accelerators."""
    return Size(4, 256, heads=4, vocabulary=1024, family=family, classes=1000, pixels=64)


def _image_model(function: str) -> Size:
    return Size(0, 0, family=function, classes=1000, pixels=64)


# The models of torch_xla's dynamo training table, a ViT, GPT-2 and Llama.
MODELS = {
    "ResNet-18": _image_model("resnet18"),
    "ResNet-50": _image_model("resnet50"),
    "ResNeXt-50": _image_model("resnext50_32x4d"),
    "BERT": _transformer("bert"),
    "AlexNet": _image_model("alexnet"),
    "MobileNetV2": _image_model("mobilenet_v2"),
    "MNASNet": _image_model("mnasnet1_0"),
    "VGG-16": _image_model("vgg16"),
    "SqueezeNet": _image_model("squeezenet1_1"),
    "ViT": _transformer(VIT),
    "GPT-2": _transformer("gpt2"),
    "Llama": replace(_transformer("llama"), options=(("num_key_value_heads", 2),)),
}


def off_by(found: Found, name: str, other: str, steps: int | None = None) -> float | None:
    """The largest difference between the losses of two runs; None if one of them was not measured.

    Args:
        found: the runs.
        name, other: of the runs.
        steps: compares only so many from the start.
    """
    if name not in found.timings or other not in found.timings:
        return None
    pairs = zip(found.timings[name].losses[:steps], found.timings[other].losses[:steps], strict=True)
    # Not max(): it may lose what is not a number.
    return float(np.max([abs(one - two) / max(1.0, abs(two)) for one, two in pairs]))


def add_targets(made: report.Report, model: str, found: Found, names: Sequence[str], *, dropout: bool = True) -> None:
    """Adds the targets of the chosen runs; a figure that was not measured misses its target."""
    ours = found.get(STEP, "wall_ms")
    if STEP in names and LAZY in names:
        to_lazy = divided(found.get(LAZY, "wall_ms"), ours)
        made.target(f"{model}: throughput to {LAZY}", to_lazy, "at least", 1)
    if STEP in names and any(name in names for name in OPENXLA):
        to_best = divided(found.best(OPENXLA, "wall_ms"), ours)
        made.target(f"{model}: throughput to the best openxla", to_best, "at least", 1)
    if INLINED in names:
        for what in ("compiles", "executions"):
            made.target(f"{model}: {what} with dynamo", found.get(INLINED, what), "exactly", 1)
        if STEP in names:
            made.target(f"{model}: losses with dynamo to ours", off_by(found, INLINED, STEP), "exactly", 0)
    for name in (STEP, INLINED):
        if name in names and CPU in names and not dropout:
            far = off_by(found, name, CPU, COMPARED)
            made.target(f"{model}: losses of {name} to the CPU", far, "at most", LOSS_LIMIT)


def table_of(found: dict[str, Found], batch: int) -> str:
    """The models as a table, followed by the failed runs."""
    rows, lines = [], []
    for model, one in found.items():
        walls = {name: one.get(name, "wall_ms") for name in (STEP, LAZY, CPU, INDUCTOR)}
        walls["openxla"] = one.best(OPENXLA, "wall_ms")
        order = (LAZY, "openxla", CPU, INDUCTOR)
        best = [name for name in OPENXLA if name in one.timings and one.get(name, "wall_ms") == walls["openxla"]]
        rows.append(
            (
                model,
                *(divided(1000 * batch, walls[name]) for name in (STEP, *order)),
                *(divided(walls[name], walls[STEP]) for name in order),
                best[0] if best else None,
                *(one.get(name, "executions") for name in (STEP, INLINED, *best[:1])),
                *([] if best else [None]),
                one.get(STEP, "mean_loss"),
                one.get(CPU, "mean_loss"),
            )
        )
        lines += [f"  {model} {name}: {why}" for name, why in one.failed.items()]
    headers = ["model", "ours rows/s", "lazy", "openxla", "CPU", "inductor"]
    headers += [f"to {peer}" for peer in headers[2:]]
    headers += ["best openxla", "runs", "+dynamo", "openxla", "loss", "loss CPU"]
    return "\n".join([report.table(headers, rows), *lines])


def table_with_dynamo(found: dict[str, Found], batch: int) -> str:
    """The models with `CompiledStep+dynamo`, as a table."""
    rows = [
        (
            model,
            *(one.get(INLINED, what) for what in ("compiles", "executions")),
            *(divided(1000 * batch, one.get(name, "wall_ms")) for name in (INLINED, STEP)),
            off_by(one, INLINED, STEP),
            off_by(one, INLINED, CPU, COMPARED),
        )
        for model, one in found.items()
    ]
    headers = ["model", "compiles", "runs", "rows/s", "ours rows/s", "off by from ours", "off by from the CPU"]
    return report.table(headers, rows)


def main(command: list[str] | None = None) -> int:
    """The program."""
    parser = report.parser(str(__doc__).splitlines()[0])
    add_options(parser, RUNS, Plan(warmup=5, steps=4, rounds=5), timeout=900)
    parser.add_argument("--models", default=",".join(MODELS), help="comma-separated")
    for name in ("batch", "pixels", "length"):
        parser.add_argument(f"--{name}", type=int, default=getattr(MODELS["ViT"], name))
    parser.add_argument("--no-dropout", action="store_true", help="drop nothing; compare with the plain CPU")
    options = parser.parse_args(command)
    names, plan = chosen(parser, options, RUNS)
    dropout = not options.no_dropout
    shape = {"batch": options.batch, "pixels": options.pixels, "length": options.length}
    made = report.Report("models", settings={**asdict(plan), **shape, "dropout": dropout})
    made.results["models"] = {}
    found: dict[str, Found] = {}
    for model in report.names_in(parser, options.models, MODELS, between=","):
        size = replace(MODELS[model], **shape)
        found[model] = measure(names, size if dropout else replace(size, dropout=0.0), plan, options.timeout)
        made.results["models"][model] = found[model].plain()
        add_targets(made, model, found[model], names, dropout=dropout)
        made.save(options)
    print(str(__doc__).split("\n\n", 1)[1])
    print(f"{plan}, {shape}\n")
    print(table_of(found, options.batch))
    if INLINED in names:
        print(f"\n{table_with_dynamo(found, options.batch)}")
    return made.finish(options)


if __name__ == "__main__":
    sys.exit(main())
