"""The commands `cache`, `check`, `doctor`, `preflight`, `shapes`, `train`: their options, what they print and write.

Each `add_*` gives a parser the options of a command, and names the function that runs it.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from xla_adapters.errors import ConfigError
from xla_adapters.utils import in_bytes

if TYPE_CHECKING:
    from xla_adapters.runtime.compile_cache import Entry
    from xla_adapters.tools.preflight_report import PreflightReport
    from xla_adapters.tools.tpu_compiler import Target

# Of entry points: what trains by a recipe.
_TRAIN = "xla_adapters.train"
_UNITS = "KMGT"
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


def _above_zero(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return seconds


def _bytes(text: str) -> int:
    number, unit = text[:-1], text[-1:].upper()
    if unit not in _UNITS or not number.replace(".", "", 1).isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not a size like 500M or 4G")
    return int(float(number) * 1024 ** (_UNITS.index(unit) + 1))


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
    if Path(script[0]).suffix == ".ipynb":
        raise ConfigError(
            f"{verb}: {script[0]} is a notebook, and this command runs scripts. Write its cells into one (jupyter "
            f"nbconvert --to script {script[0]}), and leave out lines that begin with % or ! and what needs them"
        )
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


def add_shapes(parser: argparse.ArgumentParser) -> None:
    """`shapes`."""
    parser.description = (
        "Says how many lengths the batches of a script should have (shapes= of its trainer): runs its first steps on "
        "the device of this machine, in a process of its own, and weighs what a compile costs against padding. "
        "Saves nothing. Exit status: 2 if the script failed, or has no lengths."
    )
    parser.usage = "xla-adapters shapes [options] (SCRIPT | -m MODULE) [its arguments ...]"
    parser.set_defaults(run=_run_shapes)
    parser.add_argument("--epochs", type=_above_zero, help="how often the data is read (default: as the script does)")
    parser.add_argument(
        "--compile-seconds", type=_above_zero, help="of one length, on the machine that trains (default: measured here)"
    )
    parser.add_argument("--timeout", type=_positive, default=900, help="seconds after which the script is ended (900)")
    _add_files(parser, "json")
    parser.add_argument("--output", action="store_true", help=_OUTPUT)
    _add_script(parser)


def _run_shapes(options: argparse.Namespace) -> int:
    from xla_adapters.tools.shapes_advice import advise_shapes

    command = command_of(options.script, options.module, "shapes")
    print("running the script until steps of two lengths were timed ...", file=sys.stderr)
    advice = advise_shapes(
        command,
        epochs=options.epochs,
        compile_seconds=options.compile_seconds,
        timeout=options.timeout,
        shows_output=options.output,
    )
    print(advice.text())
    if options.json is not None:
        options.json.write_text(json.dumps(advice.as_values(), indent=2) + "\n", encoding="utf-8")
    return 0


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
    parser.add_argument(
        "--timeout", type=_above_zero, default=900, help="seconds for tracing, and for each compile (900)"
    )
    parser.add_argument(
        "--save-programs",
        metavar="DIR",
        help="also run a script for two updates on the CPU, and compile all that a run on the slice compiles into this "
        "folder, for its cache_dir=",
    )
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
            saves_to=options.save_programs,
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
    if options.save_programs is not None:
        raise ConfigError("preflight: --save-programs is for scripts: a run compiles more than the step of a model")
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


# ---- train ------------------------------------------------------------------------------------------


def add_launch(parser: argparse.ArgumentParser) -> None:
    """`launch`."""
    parser.description = (
        "Starts a script once for each TPU chip of this machine, for TorchTPU: the processes train together, data "
        "parallel. Sets what TorchTPU needs to know of the chips, and runs torchrun. With torch_xla it is not needed: "
        "there a process drives all chips."
    )
    parser.usage = "xla-adapters launch [--processes N] (SCRIPT | -m MODULE) [its arguments ...]"
    parser.set_defaults(run=_run_launch)
    parser.add_argument("--processes", type=_positive, help="how many (one for each chip)")
    _add_script(parser)


def _run_launch(options: argparse.Namespace) -> int:
    from xla_adapters.runtime import get_runtime

    command = command_of(options.script, options.module, "launch")
    count = get_runtime().device.prepare_launch(options.processes)
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
    # In place of this process, so that signals get to torchrun, which passes them on.
    os.execv(sys.executable, [sys.executable, *torchrun, *command])


def add_train(parser: argparse.ArgumentParser) -> None:
    """`train`."""
    parser.description = (
        "Trains by a recipe: a YAML file that names a task, a model, a dataset, training arguments and options. Keys "
        "on the command line replace those of the file. docs/guides/recipes.md explains them; examples/recipes has a "
        "recipe for each task."
    )
    parser.usage = "xla-adapters train RECIPE [--key=value ...]\n       xla-adapters train RECIPE --help"
    parser.set_defaults(run=_run_train)
    parser.add_argument("recipe", help="a YAML file")
    parser.add_argument(
        "overrides", nargs=argparse.REMAINDER, help="--key=value; --help after the recipe lists all keys of its task"
    )


def _run_train(options: argparse.Namespace) -> int:
    found = list(entry_points(group=_TRAIN))
    if not found:
        raise ConfigError("train: no installed package trains by recipes; reinstall xla-adapters")
    try:
        run = found[0].load()
    except ImportError as error:
        raise ConfigError(f"train: {error}") from error
    return int(run(options.recipe, options.overrides))


# ---- cache ----------------------------------------------------------------------------------------


def add_cache(parser: argparse.ArgumentParser) -> None:
    """Gives the parser of the command `cache` its subcommands."""
    own = parser.add_subparsers(dest="cache_command", required=True)
    for name, run, text in (
        ("info", _cache_info, "says how much the folder holds, and whether this installation can use it"),
        ("list", _cache_list, "lists the compiled programs, what was used last first"),
        ("prune", _cache_prune, "removes the programs that were not used for longest"),
        ("verify", _cache_verify, "reads every byte; exit status 1 if a program would not be loaded"),
    ):
        command = own.add_parser(name, help=text, description=text)
        command.set_defaults(run=run)
        command.add_argument(
            "folder",
            metavar="DIR",
            nargs="?",
            help="a folder, or a URL, of which this machine's copy is meant; by default $XLA_ADAPTERS_CACHE_DIR, or "
            "that in your cache directory",
        )
        if name == "prune":
            command.add_argument(
                "--size", type=_bytes, required=True, help="how much may stay: 500M, 4G; 0K is nothing"
            )


def _cache(options: argparse.Namespace) -> tuple[Path, list[Entry]]:
    from xla_adapters.runtime.compile_cache import SWITCHES, FolderProblem, entries, folder_of

    variable = os.environ.get("XLA_ADAPTERS_CACHE_DIR", "")
    try:
        folder = folder_of(options.folder or ("" if variable.lower() in SWITCHES else variable))
        return folder, entries(folder)
    except FolderProblem as problem:
        raise ConfigError(str(problem)) from problem


def _cache_info(options: argparse.Namespace) -> int:
    from xla_adapters.runtime.compile_cache import distrust, why_missing

    folder, found = _cache(options)
    print(f"{folder}: {len(found)} programs, {in_bytes(sum(entry.size for entry in found))}")
    missing = distrust(folder) or why_missing()
    print("this installation can use it" if missing is None else f"this installation cannot use it: {missing}")
    return 0


def _cache_list(options: argparse.Namespace) -> int:
    for entry in _cache(options)[1]:
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.used))
        print(f"{entry.path.name}  {in_bytes(entry.size):>10}  used {used}")
    return 0


def _cache_prune(options: argparse.Namespace) -> int:
    from xla_adapters.runtime.compile_cache import FolderProblem, prune

    folder, _ = _cache(options)
    try:
        removed = prune(folder, options.size)
    except FolderProblem as problem:
        raise ConfigError(str(problem)) from problem
    print(f"removed {len(removed)} programs, {in_bytes(sum(entry.size for entry in removed))}")
    return 0


def _cache_verify(options: argparse.Namespace) -> int:
    from xla_adapters.runtime.compile_cache import distrust

    folder, found = _cache(options)
    of_all = distrust(folder)
    if of_all is not None:
        print(of_all)
    problems = [(entry.path.name, problem) for entry in found if (problem := entry.problem()) is not None]
    for name, problem in problems:
        print(f"{name} would not be loaded: {problem}")
    print(f"{len(found)} programs, {len(problems if of_all is None else found)} of them would not be loaded")
    return int(bool(problems) or of_all is not None)
