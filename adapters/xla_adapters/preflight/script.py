"""`preflight_script`: compiles the steps of a user's script for a slice of TPUs, and reports."""

from __future__ import annotations

import json
import os
import pickle
import re
import shlex
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from xla_adapters.errors import ConfigError, UnsupportedOptionError
from xla_adapters.hlo.cost import cost_of
from xla_adapters.preflight import script_process
from xla_adapters.preflight.compiler import compile_module
from xla_adapters.preflight.report import PreflightReport
from xla_adapters.preflight.run import NO_SHARDING, can_shard, check_target, report_on
from xla_adapters.preflight.run_preflight import Estimate, RunPreflight
from xla_adapters.preflight.script_process import Traced
from xla_adapters.preflight.target import Compiler, Target
from xla_adapters.preflight.trace_process import environment_for
from xla_adapters.scripts.running import run_limited
from xla_adapters.sharding import Mesh
from xla_adapters.sharding.planner import Topology
from xla_adapters.utils.location import location_of_line

_KEPT_OUTPUT = 2000
_FRAME = re.compile(r'^  File "([^"]+)", line (\d+) in ', re.MULTILINE)
# Nothing goes to services that log runs.
_SETTINGS = {"WANDB_MODE": "disabled", "TOKENIZERS_PARALLELISM": "false"}


def preflight_script(
    command: Sequence[str],
    target: Target,
    *,
    sharding: str | None = None,
    timeout: float = 900,
    shows_output: bool = False,
) -> RunPreflight:
    """Says whether the steps of a script compile for a slice of TPUs, fit their memory, and what bounds them.

    The script runs in a process of its own, on placeholders without memory, until it has traced one update of its
    training and one step of its evaluation. Its model is made on the host, as the script makes it.

    Args:
        command: the script and its arguments; or `-m`, a module and its arguments.
        target: the slice.
        sharding: for trainers that do not shard by themselves: the name of a plan.
        timeout: seconds for tracing, and for each compile.
        shows_output: whether what the script prints is shown.

    Raises:
        ConfigError: libtpu does not know the slice, or what traces with TorchTPU is not installed.
        UnsupportedOptionError: the runtime is TorchTPU, and a sharding is asked for.
    """
    if sharding is not None and not can_shard():
        raise UnsupportedOptionError(NO_SHARDING)
    request = {"command": list(command), "sharding": sharding, "generation": target.generation}
    return preflight_process(
        shlex.join(command),
        target,
        lambda folder: (folder / script_process.REQUEST).write_text(json.dumps(request)),
        timeout=timeout,
        shows_output=shows_output,
    )


def preflight_process(
    what: str,
    target: Target,
    write_request: Callable[[Path], object],
    *,
    timeout: float = 900,
    shows_output: bool = False,
) -> RunPreflight:
    """As `preflight_script`.

    Args:
        what: is traced, in words.
        target: the slice.
        write_request: writes what the tracing process reads into a folder.
        timeout, shows_output: as there.

    Raises:
        ConfigError: as there.
    """
    missing = _missing_compiler(target)
    with tempfile.TemporaryDirectory(prefix="xla-adapters-preflight-") as name:
        folder = Path(name)
        write_request(folder)
        output = folder / "output.txt"
        ended = run_limited(
            ["-m", script_process.__name__, name],
            environment={**environment_for(target.devices), **_SETTINGS},
            timeout=timeout,
            output=None if shows_output else output,
        )
        answer = folder / script_process.ANSWER
        said = "" if shows_output else output.read_text(errors="replace")
        if not answer.is_file():
            problem = f"the process that traces the steps {ended}{_crashed(said) or _end_of(said)}"
            return RunPreflight(what=what, topology=str(target), problem=problem)
        traced: Traced = pickle.loads(answer.read_bytes())
        if traced.in_output:
            traced.problem += _end_of(said)
    return report_traced(what, target, traced, timeout=timeout, missing=missing)


def report_traced(what: str, target: Target, traced: Traced, *, timeout: float, missing: str = "") -> RunPreflight:
    """Compiles the graphs of a run, and reports.

    Args:
        what: was traced, in words.
        target: the slice.
        traced: the graphs.
        timeout: seconds for each compile.
        missing: why nothing can be compiled; empty if it can.
    """
    report = RunPreflight(
        what=what,
        topology=str(target),
        problem=traced.problem or _unsharded(traced, target),
        notes=(*traced.changed, *(f"not saved: {text}" for text in traced.skipped)),
        hbm_bytes=int(Topology.preset(target.generation).memory_bytes),
        invalid=traced.invalid or bool(_unsharded(traced, target)),
    )
    if report.invalid or not traced.steps:
        return report
    known = report.__dict__
    if missing:
        return RunPreflight(**{**known, "problem": missing, "estimates": _estimates(traced, target)})
    return RunPreflight(**{**known, "graphs": tuple(_compiled(traced, target, timeout))})


def _compiled(traced: Traced, target: Target, timeout: float) -> list[PreflightReport]:
    mesh = traced.plan.mesh if traced.plan is not None else Mesh.data_and_model(1, 1)
    where = "" if target.devices == 1 else f", on one of {target.devices} devices"
    if traced.plan is not None:
        where = f", sharding {traced.plan.name} on {mesh}"
    return [
        report_on(
            f"{step.kind}{where}", step, compile_module(step.module, target, form=step.form, timeout=timeout), mesh
        )
        for step in traced.steps
    ]


def _estimates(traced: Traced, target: Target) -> tuple[Estimate, ...]:
    found = []
    peak = Topology.preset(target.generation).flops
    for step in traced.steps:
        # Counted in an HLO module only.
        flops = cost_of(step.module).flops if step.form == "hlo" else None
        share = None if flops is None else flops / target.devices
        seconds = None if share is None else share / peak
        found.append(Estimate(step=step.kind, argument_bytes=step.argument_bytes, flops=share, seconds=seconds))
    return tuple(found)


def _unsharded(traced: Traced, target: Target) -> str:
    if traced.plan is not None or target.devices == 1 or not traced.steps or not can_shard():
        return ""
    return (
        f"the training is not sharded and uses one device, and {target} has {target.devices}: shard it (sharding= or "
        "auto_sharding= of the trainer or strategy, or --sharding), or name a slice of one device, as v5e:1x1"
    )


def _end_of(said: str) -> str:
    """The end of what the script printed, for messages."""
    text = said.strip()[-_KEPT_OUTPUT:]
    return f"; it printed:{os.linesep}{text}" if text else ""


def _crashed(said: str) -> str:
    """Where the process crashed, by the text of `faulthandler`; empty if it has not written one."""
    _, fatal, text = said.partition("Fatal Python error: ")
    if not fatal:
        return ""
    frames = (location_of_line(file, int(line)) for file, line in _FRAME.findall(text))
    place = next((f" at {at.filename}:{at.lineno}" for at in frames if at.is_user_code), "")
    return (
        f" ({text.partition(os.linesep)[0]}){place}; in a pre-flight tensors have no values: nothing can be read from "
        "the device, and nothing computed on it outside of a step"
    )


def _missing_compiler(target: Target) -> str:
    """Why nothing can be compiled: libtpu is not installed.

    Raises:
        ConfigError: libtpu does not know the slice.
    """
    try:
        Compiler.find()
    except ConfigError as error:
        return str(error)
    check_target(target)
    return ""
