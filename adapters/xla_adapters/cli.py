"""The command `xla-adapters`: plans, compiles and runs trainings, manages checkpoints, checks scripts."""

from __future__ import annotations

import argparse
import dataclasses
import math
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, get_args

from xla_adapters.errors import ConfigError, XLAAdapterError, entry, explained, meaning
from xla_adapters.tools import commands

if TYPE_CHECKING:
    from xla_adapters.sharding import ShardingPlan

_GIGABYTE = 10**9


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status.

    Args:
        arguments: of the command line; those of the process if not given.
    """
    try:
        options = _parser().parse_args(arguments)
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


class _Command(argparse.ArgumentParser):
    """The parser of one command, which gets its options when it is chosen: they may need torch, and `--help` does not.

    Attributes:
        fill: gives it the options.
    """

    fill: Callable[[argparse.ArgumentParser], None] | None = None

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As of `ArgumentParser`."""
        fill, self.fill = self.fill, None
        if fill is not None:
            fill(self)
        return super().parse_known_args(args, namespace)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="xla-adapters", description=__doc__)
    # What reads the values of an option is called while the command is parsed: its errors are the command's.
    known = parser.add_subparsers(dest="command", required=True, parser_class=_Command)
    for name, fill, what in (
        ("plan", _add_plan, "how a model would be split over a mesh, and what a step would cost"),
        ("preflight", commands.add_preflight, "compiles a training for TPUs that are not there: does it fit?"),
        ("checkpoint", _add_checkpoint, "list, verify, repair and consolidate checkpoints"),
        ("cache", commands.add_cache, "the folder of compiled programs: info, list, prune and verify"),
        (
            "check",
            commands.add_check,
            "run the first steps of a script on CPU devices, and report what XLA makes slow or refuses",
        ),
        ("shapes", commands.add_shapes, "how many lengths the batches of a script should have"),
        (
            "launch",
            commands.add_launch,
            "starts a script once for each chip (TorchTPU); the processes train together",
        ),
        ("train", commands.add_train, "trains by a recipe: a YAML file of task, model, data and options"),
        ("doctor", commands.add_doctor, "versions, devices, known traps, and a short test of each feature"),
        ("explain", _add_explain, "what an error or a warning means, and what to do"),
    ):
        known.add_parser(name, help=what).fill = fill
    return parser


def _add_checkpoint(parser: argparse.ArgumentParser) -> None:
    from xla_adapters.checkpoint.commands import add_options

    add_options(parser)


def _add_explain(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", help="of its class, e.g. TensorReadError; lists them all if not given")
    parser.set_defaults(run=_run_explain)


def _run_explain(options: argparse.Namespace) -> int:
    if options.name is not None:
        print(entry(options.name))
        return 0
    for name, cls in explained().items():
        print(f"{name:26}{meaning(cls).splitlines()[0]}")
    return 0


def _add_plan(plan: argparse.ArgumentParser) -> None:
    from xla_adapters.sharding import MEASURED_PLANS, Scheme, TopologyName

    plan.add_argument(
        "--model", required=True, help="a configuration file of transformers, or module:factory of your own"
    )
    where = plan.add_mutually_exclusive_group()
    where.add_argument("--mesh", type=commands.numbers, help="devices along the data and the model axis, e.g. 2x4")
    where.add_argument("--devices", type=int, help="how many devices (those of the slice); the mesh is chosen")
    plan.add_argument(
        "--batch", required=True, type=commands.batch, help="samples of all devices, and their length: 16x2048"
    )
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


def _run_plan(options: argparse.Namespace) -> int:
    plan = _plan(options)
    print(plan.report())
    if options.save is not None:
        plan.save(options.save)
    if options.html is not None:
        Path(options.html).write_text(plan.visualize(form="html"), encoding="utf-8")
    return 0


def _plan(options: argparse.Namespace) -> ShardingPlan:
    import torch

    from xla_adapters.sharding import ShardingConfig, checkpoint_activations, load_model, make_plan
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
    from xla_adapters.tools.tpu_compiler import Target

    if options.mesh is not None:
        return math.prod(options.mesh)
    if options.devices is not None:
        return int(options.devices)
    if ":" not in options.topology:
        raise ConfigError("give --mesh, --devices, or the slice in --topology, as in --topology v5p:2x2x2")
    return Target.parse(options.topology).devices


if __name__ == "__main__":
    sys.exit(main())
