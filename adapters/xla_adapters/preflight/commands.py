"""The command `xla-adapters preflight`: compiles a training step for TPUs that are not there."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast, get_args

from xla_adapters.errors import ConfigError
from xla_adapters.preflight.job import OPTIMIZERS
from xla_adapters.preflight.run import Dtype, StepOptions, preflight
from xla_adapters.preflight.target import Target
from xla_adapters.sharding.config import Scheme
from xla_adapters.sharding.model_loading import load_model
from xla_adapters.sharding.plan import ShardingPlan


def add_parser(commands: Any, numbers: Callable[[str], tuple[int, ...]]) -> None:
    """Adds the command `preflight`.

    Args:
        commands: the subparsers of the command line.
        numbers: reads numbers like `16x1024`.
    """
    text = "compiles a training step for TPUs that are not there: does it fit, and what bounds it?"
    parser = commands.add_parser("preflight", help=text, description=f"{text} Exit status 1 if it does not fit.")
    parser.add_argument(
        "--model", required=True, help="a configuration file of transformers, or module:factory of your own"
    )
    parser.add_argument("--topology", required=True, help="generation, and chips along each dimension: v5e:2x4")
    parser.add_argument(
        "--batch", required=True, type=numbers, help="samples of all devices, and their length: 16x1024"
    )
    parser.add_argument(
        "--sharding", default="auto", help=f"{', '.join(get_args(Scheme))} or a plan's file (auto, which plans)"
    )
    parser.add_argument("--mesh", type=numbers, help="devices along the data and the model axis, e.g. 2x4")
    parser.add_argument("--optimizer", default="adamw", choices=tuple(OPTIMIZERS), help="(adamw)")
    parser.add_argument(
        "--dtype",
        default="float32",
        choices=get_args(Dtype),
        help="of the parameters; bf16-mixed is float32 with autocast, as bf16=True of a Trainer (float32)",
    )
    parser.add_argument("--gradient-checkpointing", action="store_true", help="keep one activation per layer")
    parser.add_argument("--timeout", type=float, default=900, help="seconds for tracing, and for compiling (900)")
    parser.add_argument("--no-alternatives", action="store_true", help="do not look for variants that fit")
    parser.add_argument("--json", metavar="FILE", help="write the report there, too")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    rows, *length = options.batch
    step = StepOptions(
        name=options.model,
        rows=rows,
        length=length[0] if length else None,
        sharding=_sharding(options.sharding),
        mesh=options.mesh,
        optimizer=options.optimizer,
        dtype=options.dtype,
        gradient_checkpointing=options.gradient_checkpointing,
    )
    report = preflight(
        lambda rows, length: load_model(options.model, rows, length),
        step,
        Target.parse(options.topology),
        timeout=options.timeout,
        alternatives=not options.no_alternatives,
    )
    print(report.text())
    if options.json is not None:
        Path(options.json).write_text(json.dumps(report.as_values(), indent=2) + "\n", encoding="utf-8")
    return 0 if report.fits else 1


def _sharding(given: str) -> Scheme | ShardingPlan:
    if given in get_args(Scheme):
        return cast(Scheme, given)
    if not Path(given).is_file():
        raise ConfigError(f"--sharding {given}: give one of {', '.join(get_args(Scheme))}, or the file of a plan")
    return ShardingPlan.load(given)
