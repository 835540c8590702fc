"""The command `xla-adapters`: plans and compiles trainings, manages checkpoints, explains errors, checks scripts."""

from __future__ import annotations

import argparse
import dataclasses
import math
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import get_args

import torch

from xla_adapters.checkpoint import commands as checkpoint_commands
from xla_adapters.errors import ConfigError, XLAAdapterError, entry, explained, meaning
from xla_adapters.insight import commands as insight_commands
from xla_adapters.preflight import commands as preflight_commands
from xla_adapters.preflight.target import Target
from xla_adapters.sharding import (
    MEASURED_PLANS,
    Scheme,
    ShardingConfig,
    ShardingPlan,
    TopologyName,
    checkpoint_activations,
    load_model,
)

_GIGABYTE = 10**9


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status.

    Args:
        arguments: of the command line; those of the process if not given.
    """
    options = _parser().parse_args(arguments)
    try:
        with _signals_raise():
            status: int = options.run(options)
    except XLAAdapterError as error:
        print(f"xla-adapters: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("xla-adapters: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    return status


@contextmanager
def _signals_raise() -> Iterator[None]:
    """A context in which SIGTERM and SIGHUP raise, so that processes and folders of a command go when it ends."""

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    # Handlers of the process, and nohup, are left alone; only the main thread may set one.
    in_main = threading.current_thread() is threading.main_thread()
    numbers = (signal.SIGTERM, signal.SIGHUP) if in_main else ()
    changed = [number for number in numbers if signal.getsignal(number) == signal.SIG_DFL]
    for number in changed:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in changed:
            signal.signal(number, signal.SIG_DFL)


def _run_plan(options: argparse.Namespace) -> int:
    plan = _plan(options)
    print(plan.report())
    if options.save is not None:
        plan.save(options.save)
    if options.html is not None:
        Path(options.html).write_text(plan.visualize(form="html"), encoding="utf-8")
    return 0


def _run_explain(options: argparse.Namespace) -> int:
    if options.name is not None:
        print(entry(options.name))
        return 0
    for name, cls in explained().items():
        print(f"{name:26}{meaning(cls).splitlines()[0]}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="xla-adapters", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    plan = commands.add_parser("plan", help="how a model would be split over a mesh, and what a step would cost")
    plan.add_argument(
        "--model", required=True, help="a configuration file of transformers, or module:factory of your own"
    )
    where = plan.add_mutually_exclusive_group()
    where.add_argument("--mesh", type=_numbers, help="devices along the data and the model axis, e.g. 2x4")
    where.add_argument("--devices", type=int, help="how many devices (those of the slice); the mesh is chosen")
    plan.add_argument("--batch", required=True, type=_batch, help="samples of all devices, and their length: 16x2048")
    plan.add_argument(
        "--sharding", default="auto", choices=get_args(Scheme), help="auto plans, the others are templates"
    )
    plan.add_argument(
        "--topology",
        default="v5e",
        help=f"what devices and links can do: {', '.join(get_args(TopologyName))}, or a slice: v5p:2x2x2 (v5e)",
    )
    plan.add_argument(
        "--measure",
        nargs="?",
        type=int,
        const=MEASURED_PLANS,
        metavar="K",
        help="compile the K best plans (2) and the templates, for TPUs with libtpu, and compare what the compiler says",
    )
    plan.add_argument("--memory", type=float, help="GB per device (nine tenths of what the topology's devices have)")
    plan.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"), help="of the parameters (float32)")
    plan.add_argument("--gradient-checkpointing", action="store_true", help="keep one activation per layer")
    plan.add_argument("--save", help="write the plan to this file, to read, edit and use")
    plan.add_argument("--html", help="draw the plan into this file")
    plan.set_defaults(run=_run_plan)
    preflight_commands.add_parser(commands, _numbers, _batch)
    checkpoint_commands.add_parser(commands)
    insight_commands.add_parsers(commands)
    explain = commands.add_parser("explain", help="what an error or a warning means, and what to do")
    explain.add_argument("name", nargs="?", help="of its class, e.g. TensorReadError; lists them all if not given")
    explain.set_defaults(run=_run_explain)
    return parser


def _numbers(text: str) -> tuple[int, ...]:
    parts = text.lower().split("x")
    if not all(part.isdigit() and int(part) > 0 for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers like 2x4")
    return tuple(int(part) for part in parts)


def _batch(text: str) -> tuple[int, ...]:
    numbers = _numbers(text)
    if len(numbers) > 2:
        raise argparse.ArgumentTypeError(f"{text!r} is not the number of samples and their length, as 16x1024")
    return numbers


def _plan(options: argparse.Namespace) -> ShardingPlan:
    # Imported late: the planner and its solver take seconds to import.
    from xla_adapters.sharding import make_plan
    from xla_adapters.sharding.planner import Planner, Topology

    rows, *length = options.batch
    model, batch, around = load_model(options.model, rows, length[0] if length else None)
    model.to(getattr(torch, options.dtype))
    if options.gradient_checkpointing:
        checkpoint_activations(model)
    automatic = options.sharding == "auto"
    config = ShardingConfig(
        scheme=options.sharding,
        mesh_shape=options.mesh,
        topology=options.topology if automatic else None,
        memory_budget=int(options.memory * _GIGABYTE) if automatic and options.memory is not None else None,
        # Planning needs no device.
        measure_top_k=options.measure if options.measure is not None else 0 if automatic else None,
    )
    plan = make_plan(model, config, _devices(options), example=lambda: batch, around=around)
    if plan.predicted is None:
        topology = Topology.preset(options.topology.partition(":")[0])
        (predicted,) = Planner.begin(model, batch, topology=topology, around=around).costs([plan])
        plan = dataclasses.replace(plan, predicted=predicted)
    return plan


def _devices(options: argparse.Namespace) -> int:
    if options.mesh is not None:
        return math.prod(options.mesh)
    if options.devices is not None:
        return int(options.devices)
    if ":" not in options.topology:
        raise ConfigError("give --mesh, --devices, or the slice in --topology, as in --topology v5p:2x2x2")
    return Target.parse(options.topology).devices


if __name__ == "__main__":
    sys.exit(main())
