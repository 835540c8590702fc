"""The commands `check`, `doctor` and `preflight`: their options, and what they print and write.

Each `add_*` gives a parser the options of a command, and names the function that runs it.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from xla_adapters.errors import ConfigError

if TYPE_CHECKING:
    from xla_adapters.tools.preflight_report import PreflightReport
    from xla_adapters.tools.tpu_compiler import Target

_OUTPUT = "show what the script prints"


def numbers(text: str) -> tuple[int, ...]:
    """Reads numbers like `2x4`."""
    parts = text.lower().split("x")
    if not all(part.isdigit() and int(part) > 0 for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers like 2x4")
    return tuple(int(part) for part in parts)


def batch(text: str) -> tuple[int, ...]:
    """Reads the size of a batch, like `16x1024`."""
    sizes = numbers(text)
    if len(sizes) > 2:
        raise argparse.ArgumentTypeError(f"{text!r} is not the number of samples and their length, as 16x1024")
    return sizes


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return seconds


def _new_file(text: str) -> Path:
    """A file that can be written: found out before a compiler or a script has worked for minutes."""
    path = Path(text)
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written")
    return path


def _add_files(parser: argparse.ArgumentParser, *forms: str) -> None:
    for form in forms:
        text = "as a page" if form == "html" else "for other programs"
        parser.add_argument(f"--{form}", type=_new_file, metavar="FILE", help=f"write the report {text} into this file")


def _add_script(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-m", dest="module", nargs=argparse.REMAINDER, help="a module and its arguments, as python -m runs it"
    )
    parser.add_argument("script", nargs=argparse.REMAINDER, help="the script and its arguments")


def command_of(script: Sequence[str], module: Sequence[str] | None, verb: str) -> list[str]:
    """The command that a command line names.

    Args:
        script: a script and its arguments.
        module: of the option `-m`: a module and its arguments.
        verb: of the command line, for messages.

    Raises:
        ConfigError: there is no such script, or none is named.
    """
    if module:
        return ["-m", *module]
    if not script:
        raise ConfigError(f"{verb}: give the script to {verb}, or -m and a module")
    if not Path(script[0]).is_file():
        raise ConfigError(f"{verb}: there is no file {script[0]}")
    return list(script)


# ---- check and doctor -------------------------------------------------------------------------------


def add_check(parser: argparse.ArgumentParser) -> None:
    """`check`."""
    parser.description = (
        "Runs the first training steps of a script, unchanged, in a process of its own on CPU devices. Reports graph "
        "breaks, operators computed on the host, recompiles, what is traced and why, padding, and what would differ on "
        "a TPU, each with its line and what to do. Saves nothing. Exit status: 0 nothing to change, 1 something to "
        "change, 2 the script could not be checked."
    )
    parser.usage = "xla-adapters check [options] (SCRIPT | -m MODULE) [its arguments ...]"
    parser.set_defaults(run=_run_check)
    parser.add_argument("--steps", type=_positive, default=8, help="how many training steps (8)")
    parser.add_argument("--timeout", type=_positive, default=300, help="seconds after which the script is ended (300)")
    parser.add_argument("--devices", type=_positive, default=1, help="how many CPU devices the script sees (1)")
    _add_files(parser, "html", "json")
    parser.add_argument("--output", action="store_true", help=_OUTPUT)
    _add_script(parser)


def _run_check(options: argparse.Namespace) -> int:
    from xla_adapters.tools.check_report import check_script

    command = command_of(options.script, options.module, "check")
    print(f"running the first {options.steps} steps on CPU devices ...", file=sys.stderr)
    report = check_script(
        command,
        steps=options.steps,
        timeout=options.timeout,
        devices=options.devices,
        shows_output=options.output,
    )
    print(report.text())
    if options.html is not None:
        options.html.write_text(report.page(), encoding="utf-8")
    if options.json is not None:
        options.json.write_text(report.json(), encoding="utf-8")
    return report.status


def add_doctor(parser: argparse.ArgumentParser) -> None:
    """`doctor`."""
    parser.description = (
        "Prints versions, devices, what is known to go wrong with just these, and tests each feature in a process "
        "beside this one. Exit status: 1 if a test failed."
    )
    parser.set_defaults(run=_run_doctor)
    parser.add_argument("--full", action="store_true", help="test several devices and the adapters, too")
    _add_files(parser, "json")


def _run_doctor(options: argparse.Namespace) -> int:
    from xla_adapters.tools.doctor import examine

    found = examine(is_full=options.full)
    print(found.text())
    if options.json is not None:
        options.json.write_text(found.json(), encoding="utf-8")
    return found.status


# ---- preflight --------------------------------------------------------------------------------------


def add_preflight(parser: argparse.ArgumentParser) -> None:
    """`preflight`."""
    from xla_adapters.sharding import Scheme
    from xla_adapters.tools.preflight import Dtype
    from xla_adapters.tools.trace_process import OPTIMIZERS

    parser.description = (
        "Compiles a training for TPUs that are not there: does it fit, and what bounds it? Of a script, which is not "
        "changed, or of a model. Exit status 1 if it does not fit."
    )
    parser.usage = (
        "xla-adapters preflight --topology SLICE [options] (SCRIPT | -m MODULE) [its arguments ...]\n"
        "       xla-adapters preflight --topology SLICE --model MODEL --batch BATCH [options]"
    )
    parser.set_defaults(run=_run_preflight)
    parser.add_argument("--topology", required=True, help="generation, and chips along each dimension: v5e:2x4")
    parser.add_argument(
        "--sharding",
        help=f"{', '.join(get_args(Scheme))}; for a model also a plan's file (auto, which plans), for a script only if "
        "its trainer does not shard by itself",
    )
    parser.add_argument("--timeout", type=_seconds, default=900, help="seconds for tracing, and for each compile (900)")
    _add_files(parser, "json", "html")
    parser.add_argument("--output", action="store_true", help=_OUTPUT)
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
    _add_script(parser)


def _run_preflight(options: argparse.Namespace) -> int:
    from xla_adapters.sharding import Scheme
    from xla_adapters.tools.preflight import preflight_script
    from xla_adapters.tools.tpu_compiler import Target

    target, schemes = Target.parse(options.topology), get_args(Scheme)
    if options.model is not None:
        report = _preflight_model(options, target, schemes)
    else:
        for name in ("batch", "mesh", "optimizer", "dtype", "gradient_checkpointing", "no_alternatives"):
            if getattr(options, name):
                raise ConfigError(f"preflight: --{name.replace('_', '-')} is for --model; a script has its own")
        if options.sharding not in (None, *schemes):
            raise ConfigError(f"--sharding {options.sharding}: for a script give one of {', '.join(schemes)}")
        report = preflight_script(
            command_of(options.script, options.module, "preflight"),
            target,
            sharding=options.sharding,
            timeout=options.timeout,
            shows_output=options.output,
        )
    print(report.text())
    if options.html is not None:
        options.html.write_text(report.page(), encoding="utf-8")
    if options.json is not None:
        options.json.write_text(json.dumps(report.as_values(), indent=2) + "\n", encoding="utf-8")
    return report.status


def _preflight_model(options: argparse.Namespace, target: Target, schemes: tuple[str, ...]) -> PreflightReport:
    from xla_adapters.sharding import ShardingPlan, load_model
    from xla_adapters.tools.preflight import StepOptions, preflight_model

    if options.script or options.module:
        raise ConfigError("preflight: give a script or --model, not both")
    if options.output:
        raise ConfigError("preflight: --output is for scripts")
    if options.batch is None:
        raise ConfigError("preflight: --model needs --batch, as in --batch 16x1024")
    sharding: Any = options.sharding or "auto"
    if sharding not in schemes:
        if not Path(sharding).is_file():
            raise ConfigError(f"--sharding {sharding}: give one of {', '.join(schemes)}, or the file of a plan")
        sharding = ShardingPlan.load(sharding)
    rows, *length = options.batch
    step = StepOptions(
        name=options.model,
        rows=rows,
        length=length[0] if length else None,
        sharding=sharding,
        mesh=options.mesh,
        optimizer=options.optimizer or "adamw",
        dtype=options.dtype or "float32",
        gradient_checkpointing=options.gradient_checkpointing,
    )
    return preflight_model(
        lambda rows, length: load_model(options.model, rows, length),
        step,
        target,
        timeout=options.timeout,
        alternatives=not options.no_alternatives,
    )
