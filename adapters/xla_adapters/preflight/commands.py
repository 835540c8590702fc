"""The command `xla-adapters preflight`: compiles a training step for TPUs that are not there."""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast, get_args

from xla_adapters.errors import ConfigError
from xla_adapters.preflight.job import OPTIMIZERS
from xla_adapters.preflight.page import page
from xla_adapters.preflight.run import Dtype, StepOptions, preflight
from xla_adapters.preflight.script import preflight_script
from xla_adapters.preflight.target import Target
from xla_adapters.scripts.running import command_of
from xla_adapters.sharding import Scheme, ShardingPlan, load_model


def add_parser(
    commands: Any, numbers: Callable[[str], tuple[int, ...]], batch: Callable[[str], tuple[int, ...]]
) -> None:
    """Adds the command `preflight`.

    Args:
        commands: the subparsers of the command line.
        numbers: reads numbers like `2x4`.
        batch: reads the size of a batch, like `16x1024`.
    """
    text = "compiles a training for TPUs that are not there: does it fit, and what bounds it?"
    parser = commands.add_parser(
        "preflight",
        help=text,
        description=f"{text} Of a script, which is not changed, or of a model. Exit status 1 if it does not fit.",
        usage="xla-adapters preflight --topology SLICE [options] (SCRIPT | -m MODULE) [its arguments ...]\n"
        "       xla-adapters preflight --topology SLICE --model MODEL --batch BATCH [options]",
    )
    parser.add_argument("--topology", required=True, help="generation, and chips along each dimension: v5e:2x4")
    parser.add_argument(
        "--sharding",
        help=f"{', '.join(get_args(Scheme))}; for a model also a plan's file (auto, which plans), for a script only if "
        "its trainer does not shard by itself",
    )
    parser.add_argument("--timeout", type=_seconds, default=900, help="seconds for tracing, and for each compile (900)")
    parser.add_argument("--json", type=_new_file, metavar="FILE", help="write the report there, too")
    parser.add_argument(
        "--html", type=_new_file, metavar="FILE", help="of a script: write the report as a page there, too"
    )
    parser.add_argument("--output", action="store_true", help="show what the script prints")
    model = parser.add_argument_group("a model instead of a script")
    model.add_argument("--model", help="a configuration file of transformers, or module:factory of your own")
    model.add_argument("--batch", type=batch, help="samples of all devices, and their length: 16x1024")
    model.add_argument("--mesh", type=numbers, help="devices along the data and the model axis, e.g. 2x4")
    model.add_argument("--optimizer", choices=tuple(OPTIMIZERS), help="(adamw)")
    model.add_argument(
        "--dtype",
        choices=get_args(Dtype),
        help="of the parameters; bf16-mixed is float32 with autocast, as bf16=True of a Trainer (float32)",
    )
    model.add_argument("--gradient-checkpointing", action="store_true", help="keep one activation per layer")
    model.add_argument("--no-alternatives", action="store_true", help="do not look for variants that fit")
    parser.add_argument(
        "-m", dest="module", nargs=argparse.REMAINDER, help="a module and its arguments, as python -m runs it"
    )
    parser.add_argument("script", nargs=argparse.REMAINDER, help="the script and its arguments")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    if options.model is None:
        return _run_script(options)
    if options.script or options.module:
        raise ConfigError("preflight: give a script or --model, not both")
    if options.html or options.output:
        raise ConfigError("preflight: --html and --output are for scripts")
    if options.batch is None:
        raise ConfigError("preflight: --model needs --batch, as in --batch 16x1024")
    rows, *length = options.batch
    step = StepOptions(
        name=options.model,
        rows=rows,
        length=length[0] if length else None,
        sharding=_sharding(options.sharding or "auto"),
        mesh=options.mesh,
        optimizer=options.optimizer or "adamw",
        dtype=options.dtype or "float32",
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
    _write_json(options, report.as_values())
    return report.status


def _run_script(options: argparse.Namespace) -> int:
    for name in ("batch", "mesh", "optimizer", "dtype", "gradient_checkpointing", "no_alternatives"):
        if getattr(options, name):
            raise ConfigError(f"preflight: --{name.replace('_', '-')} is for --model; a script has its own")
    sharding = options.sharding
    if sharding is not None and sharding not in get_args(Scheme):
        raise ConfigError(f"--sharding {sharding}: for a script give one of {', '.join(get_args(Scheme))}")
    command = command_of(options.script, options.module, "preflight")
    report = preflight_script(
        command,
        Target.parse(options.topology),
        sharding=sharding,
        timeout=options.timeout,
        shows_output=options.output,
    )
    print(report.text())
    if options.html is not None:
        options.html.write_text(page(report), encoding="utf-8")
    _write_json(options, report.as_values())
    return report.status


def _write_json(options: argparse.Namespace, values: dict[str, Any]) -> None:
    if options.json is not None:
        options.json.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return seconds


def _new_file(text: str) -> Path:
    """A file that can be written: found out before the compiler has worked for minutes."""
    path = Path(text)
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written")
    return path


def _sharding(given: str) -> Scheme | ShardingPlan:
    if given in get_args(Scheme):
        return cast(Scheme, given)
    if not Path(given).is_file():
        raise ConfigError(f"--sharding {given}: give one of {', '.join(get_args(Scheme))}, or the file of a plan")
    return ShardingPlan.load(given)
