"""`check_script`: runs the first steps of a script on CPU devices, and reports what is slow or refused on XLA."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from xla_adapters.runtime import runtime_name
from xla_adapters.tools.check_facts import Facts
from xla_adapters.tools.check_findings import Finding, findings
from xla_adapters.tools.check_watch import check_requested
from xla_adapters.utils.child_process import ask
from xla_adapters.utils.pages import page

# Where the script runs. Nothing of it goes to services that log runs.
_SETTINGS = {
    "PJRT_DEVICE": "CPU",
    "WANDB_MODE": "disabled",
    "TOKENIZERS_PARALLELISM": "false",
    "TF_CPP_MIN_LOG_LEVEL": "2",
}
# The graphs are the same. XLA optimises their code less, which halves the time that they take to compile.
_KEPT_OUTPUT = 4000
_FLAGS = "--xla_backend_optimization_level=0"
CLEAN, FOUND, FAILED = 0, 1, 2


def check_script(
    command: Sequence[str], *, steps: int = 8, timeout: float = 300, devices: int = 1, shows_output: bool = False
) -> CheckReport:
    """Checks a script, in a process of its own.

    Args:
        command: the script and its arguments; or `-m`, a module and its arguments.
        steps: how many training steps it runs.
        timeout: seconds after which it is ended.
        devices: how many CPU devices it sees.
        shows_output: whether what it prints is shown.

    Raises:
        ConfigError: no runtime is installed.
    """
    runtime_name()
    flags = f"{_FLAGS} {os.environ.get('XLA_FLAGS', '')}".strip()
    ended = ask(
        check_requested,
        json.dumps([steps, list(command)]).encode(),
        environment={**os.environ, **_SETTINGS, "CPU_NUM_DEVICES": str(devices), "XLA_FLAGS": flags},
        timeout=timeout,
        shows_output=shows_output,
    )
    facts = pickle.loads(ended.answers[-1]) if ended.answers else Facts(asked=steps)
    return CheckReport(command=shlex.join(command), facts=facts, ended=ended.how, output=ended.printed[-_KEPT_OUTPUT:])


@dataclass(frozen=True, kw_only=True)
class CheckReport:
    """What a check has found.

    Attributes:
        command: that was checked.
        facts: what was seen.
        ended: how the process ended, in words; empty if it ended by itself.
        output: the end of what the script printed.
    """

    command: str
    facts: Facts
    ended: str = ""
    output: str = ""

    @property
    def findings(self) -> list[Finding]:
        """What should be changed, then what is only told."""
        return findings(self.facts)

    @property
    def problems(self) -> int:
        """How many findings should be changed."""
        return sum(finding.is_problem for finding in self.findings)

    @property
    def failure(self) -> str:
        """Why the script could not be checked; empty if it could."""
        facts = self.facts
        if facts.state == "failed":
            where = f" ({facts.error_place})" if facts.error_place.line else ""
            return f"the script failed: {facts.error}{where}"
        if facts.state == "running":
            return f"the script {self.ended} after {facts.done} of {facts.asked} steps"
        if not facts.steps and facts.state != "refused":
            return (
                "the script ended without a step of xla-adapters: a loop of your own marks its steps by `with "
                "xla_adapters.step():` or a function decorated with xla_adapters.CompiledStep, Fabric by `with "
                "fabric.strategy.step():`"
            )
        return ""

    @property
    def status(self) -> int:
        """Exit status: 0 nothing to change, 1 something to change, 2 the script could not be checked."""
        if self.failure:
            return FAILED
        return FOUND if self.problems else CLEAN

    def summary(self) -> str:
        """The steps that were run, in lines."""
        lines = []
        for name, step in self.facts.steps.items():
            compiles = [compile for compile in self.facts.compiles if compile.step == name]
            seconds = sum(compile.seconds for compile in compiles)
            lines.append(
                f"{name}: {step.calls} calls, {step.replays} of them replayed; compiled {len(compiles)} times, "
                f"{seconds:.1f} s; executions per call: {step.usual_executions}"
            )
        return "\n".join(lines)

    def text(self) -> str:
        """The report for a terminal."""
        lines = [f"checked {self.command}: {self.facts.done} training steps in {self.facts.seconds:.0f} s", ""]
        lines += [f"  {line}" for line in self.summary().splitlines()]
        lines += ["", *self._findings()]
        for title, notes in self.notes().items():
            lines += [f"{title}:", *(f"  {note}" for note in notes), ""]
        if self.failure:
            lines.append(f"NOT CHECKED: {self.failure}")
            lines += [f"  | {line}" for line in self.output.splitlines()[-30:]]
        elif self.problems:
            lines.append(f"{self.problems} to change, {len(self.findings) - self.problems} to know")
        else:
            lines.append(f"nothing to change, {len(self.findings)} to know")
        return "\n".join(lines)

    def notes(self) -> dict[str, list[str]]:
        """What the check itself did to the script, by title; empty lists are left out."""
        notes = {
            "put in for the check": self.facts.changed,
            "not saved": self.facts.skipped,
            "files that the script wrote": self.facts.written,
        }
        return {title: lines for title, lines in notes.items() if lines}

    def json(self) -> str:
        """The report for other programs."""
        values = {
            "command": self.command,
            "status": self.status,
            "failure": self.failure,
            "findings": [dataclasses.asdict(finding) for finding in self.findings],
            "facts": dataclasses.asdict(self.facts),
        }
        return json.dumps(values, indent=1)

    def _findings(self) -> list[str]:
        lines = []
        for number, finding in enumerate(self.findings, 1):
            mark = "!" if finding.is_problem else "-"
            lines.append(f"{mark} {number}. {finding.kind}: {finding.title}")
            if finding.place.line:
                lines.append(f"     {finding.place}: {finding.source}")
            elif finding.place.file:
                lines.append(f"     {finding.place}")
            lines += [f"     {line.strip()}" for line in finding.details.splitlines() if line.strip()]
            if finding.to_do:
                lines.append(f"     what to do: {finding.to_do}")
            lines += [f"       {line}" for line in finding.patch.splitlines()]
            lines.append("")
        return lines

    def page(self) -> str:
        """The report as one HTML file, without scripts and without anything from elsewhere."""
        return page("tools/check.html", report=self, verdict=self._verdict())

    def _verdict(self) -> tuple[str, str]:
        if self.failure:
            return f"Not checked: {self.failure}", "bad"
        if self.problems:
            return f"{self.problems} to change", "bad"
        return "Nothing to change", "good"
