"""The commands `xla-adapters check` and `xla-adapters doctor`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from xla_adapters.tools.running import command_of


def add_parsers(commands: Any) -> None:
    """Adds the commands."""
    check = commands.add_parser(
        "check",
        help="run the first steps of a script on CPU devices, and report what XLA makes slow or refuses",
        description="Runs the first training steps of a script, unchanged, in a process of its own on CPU devices. "
        "Reports graph breaks, operators computed on the host, recompiles, what is traced and why, padding, and what "
        "would differ on a TPU, each with its line and what to do. Saves nothing. Exit status: 0 nothing to change, "
        "1 something to change, 2 the script could not be checked.",
        usage="xla-adapters check [options] (SCRIPT | -m MODULE) [its arguments ...]",
    )
    check.set_defaults(run=_run_check)
    check.add_argument("--steps", type=_positive, default=8, help="how many training steps (8)")
    check.add_argument("--timeout", type=_positive, default=300, help="seconds after which the script is ended (300)")
    check.add_argument("--devices", type=_positive, default=1, help="how many CPU devices the script sees (1)")
    check.add_argument("--html", type=Path, metavar="FILE", help="write the report as a page into this file")
    check.add_argument("--json", type=Path, metavar="FILE", help="write the report for other programs into this file")
    check.add_argument("--output", action="store_true", help="show what the script prints")
    check.add_argument(
        "-m", dest="module", nargs=argparse.REMAINDER, help="a module and its arguments, as python -m runs it"
    )
    check.add_argument("script", nargs=argparse.REMAINDER, help="the script and its arguments")
    doctor = commands.add_parser(
        "doctor",
        help="versions, devices, known traps, and a short test of each feature",
        description="Prints versions, devices, what is known to go wrong with just these, and tests each feature in "
        "a process beside this one. Exit status: 1 if a test failed.",
    )
    doctor.set_defaults(run=_run_doctor)
    doctor.add_argument("--full", action="store_true", help="test several devices and the adapters, too")
    doctor.add_argument("--json", type=Path, metavar="FILE", help="write the report for other programs into this file")


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _run_check(options: argparse.Namespace) -> int:
    # Late: the other commands need none of it.
    from xla_adapters.tools.check_page import page
    from xla_adapters.tools.check_runner import check_script

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
        options.html.write_text(page(report), encoding="utf-8")
    if options.json is not None:
        options.json.write_text(report.json(), encoding="utf-8")
    return report.status


def _run_doctor(options: argparse.Namespace) -> int:
    from xla_adapters.tools.doctor import examine

    found = examine(is_full=options.full)
    print(found.text())
    if options.json is not None:
        options.json.write_text(found.json(), encoding="utf-8")
    return found.status
