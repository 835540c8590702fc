"""`examine`: the report of `xla-adapters doctor`."""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from xla_adapters.tools import doctor_trials as trials
from xla_adapters.tools.doctor_system import System, this_system
from xla_adapters.tools.doctor_traps import traps_of

_MARKS = {"ok": "ok", "failed": "FAILED", "skipped": "skipped"}
# The test whose result is what the devices are.
_DEVICES = "devices"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How one test went.

    Attributes:
        name: of the test.
        state: `ok`, `failed` or `skipped`.
        text: what it found, or why not.
        seconds: how long it took.
        output: the end of what a failed one printed.
    """

    name: str
    state: str
    text: str
    seconds: float
    output: str = ""


@dataclass(frozen=True, kw_only=True)
class Examination:
    """What `doctor` found: the system, and how each test went."""

    system: System
    outcomes: Sequence[Outcome]

    @property
    def failed(self) -> list[Outcome]:
        """The tests that failed."""
        return [outcome for outcome in self.outcomes if outcome.state == "failed"]

    @property
    def status(self) -> int:
        """Exit status: 1 if a test failed, or a trap is known with which nothing works right."""
        return int(bool(self.failed) or any(trap.is_fault for trap in traps_of(self.system)))

    def text(self) -> str:
        """The report, to read and to put into a bug report."""
        system = self.system
        lines = ["versions"]
        lines += [f"  {name:16}{number}" for name, number in system.versions.items()]
        lines += ["", "machine", f"  {system.machine}"]
        lines.append(f"  {system.devices} {system.hardware or 'unknown'} device(s)")
        lines += [f"  {name}={value}" for name, value in system.environment.items()]
        lines += ["", "known traps of this combination"]
        lines += [f"  {'!' if trap.is_fault else '-'} {trap.what}" for trap in traps_of(system)] or ["  none"]
        lines += ["", "tests"]
        lines += [
            f"  {_MARKS[outcome.state]:8}{outcome.name:20}{outcome.seconds:5.1f} s  {outcome.text}"
            for outcome in self.outcomes
        ]
        for outcome in self.failed:
            lines += ["", f"output of the test {outcome.name!r}"]
            lines += [f"  | {line}" for line in outcome.output.splitlines()]
        lines += ["", "in a bug report: all of this, what you ran, the whole error with its traceback; for a slow step"]
        lines.append("the lines of the logger xla_adapters, and what `xla-adapters check SCRIPT` says")
        return "\n".join(lines)

    def json(self) -> str:
        """The report for other programs."""
        values = {
            "status": self.status,
            "system": dataclasses.asdict(self.system),
            "traps": [{"what": trap.what, "is_fault": trap.is_fault} for trap in traps_of(self.system)],
            "tests": [dataclasses.asdict(outcome) for outcome in self.outcomes],
        }
        return json.dumps(values, indent=1)


def examine(*, is_full: bool = False) -> Examination:
    """Runs the tests, in processes forked from this one, which must not have started a runtime; looks up the traps.

    Args:
        is_full: whether those of several devices and of the adapters are run, too; they take longer.
    """
    outcomes = list(_outcomes(is_full))
    system = this_system()
    found = next((outcome for outcome in outcomes if outcome.name == _DEVICES and outcome.state == "ok"), None)
    if found is not None:
        system = dataclasses.replace(system, **json.loads(found.text))
        text = f"{system.devices} {system.hardware}"
        outcomes = [dataclasses.replace(item, text=text) if item is found else item for item in outcomes]
    return Examination(system=system, outcomes=outcomes)


def _outcomes(is_full: bool) -> Iterator[Outcome]:
    with tempfile.TemporaryFile("w+") as results, tempfile.TemporaryFile("w+") as output:
        # Forked, not started: torch need not be imported twice. The import of the runtime may end a process.
        process = os.fork()
        if process == 0:
            trials.be_process(is_full, results.fileno(), output.fileno())
        status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        results.seek(0)
        output.seek(0)
        lines, printed = list(results), output.read()
    for line in lines:
        values: dict[str, Any] = json.loads(line)
        yield Outcome(**values)
    if status != 0:
        text = f"the tests ended with status {status}"
        yield Outcome(name="import", state="failed", text=text, seconds=0.0, output=printed[-3000:])
