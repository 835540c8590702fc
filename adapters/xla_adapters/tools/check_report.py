"""`check_script`: runs the first steps of a script on CPU devices, and reports what is slow or refused on XLA."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from xla_adapters.runtime import runtime_name
from xla_adapters.tools.check_facts import Facts
from xla_adapters.tools.check_findings import Finding, findings
from xla_adapters.tools.check_watch import check_requested
from xla_adapters.utils.child_process import ask

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
_STYLE = """
:root { color-scheme: light dark; --line: #d0d7de; --soft: #f6f8fa; --bad: #b42318; --good: #116329; --quiet: #59636e }
@media (prefers-color-scheme: dark) {
  :root { --line: #3d444d; --soft: #161b22; --bad: #ff7b72; --good: #56d364; --quiet: #9198a1 }
  body { background: #0d1117; color: #e6edf3 }
}
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 60rem; padding: 0 1rem }
h1 { font-size: 1.4rem; overflow-wrap: anywhere } h2 { font-size: 1.1rem; margin-top: 2rem }
.verdict { font-size: 1.1rem; font-weight: 600 } .bad { color: var(--bad) } .good { color: var(--good) }
.finding { border: 1px solid var(--line); border-left: 4px solid var(--line); border-radius: 6px; margin: 1rem 0;
  padding: .6rem 1rem } .finding.problem { border-left-color: var(--bad) }
.finding h3 { font-size: 1rem; margin: 0 0 .4rem } .kind { color: var(--quiet); font-weight: 400 }
.where, pre, code { font-family: ui-monospace, monospace; font-size: .85rem }
.where { color: var(--quiet); overflow-wrap: anywhere }
pre { background: var(--soft); border-radius: 6px; overflow-x: auto; padding: .6rem; margin: .4rem 0 }
.minus { color: var(--bad) } .plus { color: var(--good) }
p { margin: .4rem 0 } li { overflow-wrap: anywhere }
"""


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
        verdict, kind = self._verdict()
        parts = [
            "<!doctype html>",
            f'<html lang="en"><head><meta charset="utf-8"><title>check of {escape(self.command)}</title>',
            f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head><body>',
            f"<h1>xla-adapters check {escape(self.command)}</h1>",
            f'<p class="verdict {kind}">{escape(verdict)}</p>',
            f"<p>{self.facts.done} training steps in {self.facts.seconds:.0f} s, on CPU devices.</p>",
            f"<pre>{escape(self.summary())}</pre>" if self.summary() else "",
        ]
        for title, wanted in (("To change", True), ("To know", False)):
            chosen = [finding for finding in self.findings if finding.is_problem == wanted]
            if chosen:
                parts += [f"<h2>{title}</h2>", *map(_finding, chosen)]
        for title, notes in self.notes().items():
            items = "".join(f"<li>{escape(note)}</li>" for note in notes)
            parts.append(f"<h2>{escape(title.capitalize())}</h2><ul>{items}</ul>")
        if self.failure and self.output:
            parts.append(f"<h2>What the script printed last</h2><pre>{escape(self.output)}</pre>")
        return "\n".join([*filter(None, parts), "</body></html>\n"])

    def _verdict(self) -> tuple[str, str]:
        if self.failure:
            return f"Not checked: {self.failure}", "bad"
        if self.problems:
            return f"{self.problems} to change", "bad"
        return "Nothing to change", "good"


def _finding(finding: Finding) -> str:
    kind = "finding problem" if finding.is_problem else "finding"
    title = f'<span class="kind">{escape(finding.kind)}</span> {escape(finding.title)}'
    parts = [f'<section class="{kind}"><h3>{title}</h3>']
    if finding.place.file:
        parts.append(f'<div class="where">{escape(str(finding.place))}</div>')
    if finding.source:
        parts.append(f"<pre>{escape(finding.source)}</pre>")
    parts += [f"<p>{escape(line.strip())}</p>" for line in finding.details.splitlines() if line.strip()]
    if finding.to_do:
        parts.append(f"<p><b>What to do:</b> {escape(finding.to_do)}</p>")
    if finding.patch:
        lines = (f'<span class="{_side(line)}">{escape(line)}</span>' for line in finding.patch.splitlines())
        parts.append(f"<pre>{chr(10).join(lines)}</pre>")
    return "".join([*parts, "</section>"])


def _side(line: str) -> str:
    return "minus" if line.startswith("-") else "plus"
