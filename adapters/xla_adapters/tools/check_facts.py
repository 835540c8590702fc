"""`Facts`: what a checked script did; the process that runs it answers with them."""

from __future__ import annotations

import re
import statistics
from dataclasses import dataclass, field
from typing import Literal

from xla_adapters.utils.location import Location

# How the script ended: `stopped` after the steps that were asked for, `ended` by itself before that, `refused` with an
# error of this package, `failed` with another one; `running` where its process was ended (the time limit, a crash).
State = Literal["running", "stopped", "ended", "refused", "failed"]
_LINE = re.compile(r"(/[^\n:()]*?\.py|[^\s/:()][^\s:()]*\.py|<[^>\n]+>):(\d+)")


@dataclass(kw_only=True)
class Place:
    """A line of the user's code; `line` is 0 if it is not known."""

    file: str = ""
    line: int = 0

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" if self.line else self.file

    @classmethod
    def of(cls, location: Location | None) -> Place:
        """The line of the user's code that led to a location."""
        where = location.called_from or location if location is not None else None
        return cls() if where is None else cls(file=where.filename, line=where.lineno)

    @classmethod
    def named_in(cls, message: str) -> Place:
        """The line that a message names: the last one, which is that of the user's code."""
        found = _LINE.findall(message)
        return cls(file=found[-1][0], line=int(found[-1][1])) if found else cls()


@dataclass(kw_only=True)
class Told:
    """A warning of this package: the name of its class, its text, and the line that it names."""

    category: str
    message: str
    place: Place = field(default_factory=Place)


@dataclass(kw_only=True)
class Compile:
    """One call of a step that compiled.

    Attributes:
        step: the step's name.
        call: which call it was, from 1.
        seconds: how long it took.
        reason: why, in words.
        is_first: whether it is the first graph of its phase.
    """

    step: str
    call: int
    seconds: float
    reason: str
    is_first: bool


@dataclass(kw_only=True)
class HostOperator:
    """Operators that were computed on the host, the line that called them, and how often."""

    names: list[str]
    place: Place
    calls: int = 1


@dataclass(kw_only=True)
class StepFacts:
    """One step over its calls.

    Attributes:
        calls, updates, replays: how many calls there were, with an optimizer's update, and replayed.
        may_replay: whether it is a step that can be replayed at all (`with step()` cannot, nor can Fabric's).
        is_managed: whether a trainer, Fabric or a `CompiledStep` opens and closes it.
        reasons: why calls were traced that might have been replayed, with how often.
        executions: graphs executed inside of each call.
        eager_operations: operations executed one by one since the end of the call before, for each call but the first.
    """

    calls: int = 0
    updates: int = 0
    replays: int = 0
    may_replay: bool = False
    is_managed: bool = False
    reasons: dict[str, int] = field(default_factory=dict)
    executions: list[int] = field(default_factory=list)
    eager_operations: list[int] = field(default_factory=list)

    @property
    def usual_executions(self) -> int:
        """Executions of most calls: the first one may find out whether executables can be run again."""
        return int(statistics.median_high(self.executions)) if self.executions else 0


@dataclass(kw_only=True)
class DtypeUse:
    """Where a dtype was first seen, in what, and in how many results since."""

    dtype: str
    what: str
    place: Place
    count: int = 1


@dataclass(kw_only=True)
class LoaderFacts:
    """The batches of one `DataLoader`.

    Attributes:
        place: where it was made, or used.
        samples: in its dataset; None if it has no length.
        batch: samples in its first batch.
        last: samples in the last batch of an epoch, if that is another number and is kept; else None.
        batches: seen so far.
        tokens, padding: in these; 0 tokens if there are none.
        known_by: what tells the padding (`attention_mask`, `padding token 0`).
        trains: whether training steps used it.
    """

    place: Place
    samples: int | None = None
    batch: int = 0
    last: int | None = None
    batches: int = 0
    tokens: int = 0
    padding: int = 0
    known_by: str = ""
    trains: bool = False


@dataclass(kw_only=True)
class Facts:
    """All that is known of a checked run.

    Attributes:
        asked: how many steps were asked for.
        state: how the script ended.
        error, error_place: of a script that failed or was refused.
        seconds: how long it ran.
        steps: by name.
        changed: what was put in place of something of the script's, in words.
        skipped: saves that did not happen, in words.
        written: files that the script wrote all the same.
    """

    asked: int
    state: State = "running"
    error: str = ""
    error_place: Place = field(default_factory=Place)
    seconds: float = 0.0
    steps: dict[str, StepFacts] = field(default_factory=dict)
    told: list[Told] = field(default_factory=list)
    compiles: list[Compile] = field(default_factory=list)
    host_operators: list[HostOperator] = field(default_factory=list)
    dtypes: list[DtypeUse] = field(default_factory=list)
    loaders: list[LoaderFacts] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    written: list[str] = field(default_factory=list)

    @property
    def done(self) -> int:
        """How many training steps there were: calls of the step that updated most often."""
        return max((step.updates for step in self.steps.values()), default=0)
