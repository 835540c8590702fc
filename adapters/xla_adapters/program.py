"""`StepProgram`: the step as an object. It knows what it was traced for and explains each compile."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from xla_adapters.config import XLAConfig
from xla_adapters.rng import StepSeed
from xla_adapters.step_scope import ScopeReport, StepScope

logger = logging.getLogger("xla_adapters")


class StepExecution(Protocol):
    """How one pass through a step is executed.

    `StepScope` traces it again at each pass. Another way (handing new inputs to the executable that
    an earlier pass compiled) is another class with these methods.
    """

    @property
    def is_open(self) -> bool: ...
    @property
    def executed(self) -> bool: ...
    def open(self) -> None: ...
    def close(self) -> ScopeReport: ...
    def abort(self) -> None: ...
    def translate(self, error: BaseException) -> Exception | None: ...


class Discardable(Protocol):
    """What may be under way when an error comes: a program, or several together."""

    def abort(self) -> object: ...
    def translate(self, error: BaseException) -> Exception | None: ...


@contextmanager
def discarding(steps: Discardable) -> Iterator[None]:
    """Discards what is under way if the body raises, and raises what the error means in a step."""
    try:
        yield
    except BaseException as error:
        translated = steps.translate(error)
        steps.abort()
        if translated is not None:
            raise translated from error
        raise


@dataclass(frozen=True, kw_only=True)
class StepSignature:
    """What a pass through the step looks like from outside; passes that differ here differ in graph.

    Attributes:
        phase: which part of the loop this is, e.g. `"update"` or `"accumulate"`.
        inputs: name, shape and dtype of each tensor of the batch; other values by their repr.
        facts: further things that shape the graph, as the adapter knows them.
    """

    phase: str
    inputs: tuple[tuple[str, str], ...]
    facts: tuple[tuple[str, Hashable], ...] = ()

    def difference(self, other: StepSignature) -> list[str]:
        """How this differs from an earlier signature, in words."""
        changes = []
        for mine, theirs in ((dict(self.inputs), dict(other.inputs)), (dict(self.facts), dict(other.facts))):
            for name in dict.fromkeys([*theirs, *mine]):
                before, now = theirs.get(name, "absent"), mine.get(name, "absent")
                if before != now:
                    changes.append(f"{name}: {before} -> {now}")
        return changes


@dataclass(frozen=True, kw_only=True)
class CompileEvent:
    """One pass that had to compile.

    Attributes:
        number: how many graphs the step has now.
        passes: the pass it happened in, from 1.
        graphs: graphs compiled in this pass.
        seconds: time spent compiling.
        reason: why, in words.
        where: the place in the run, e.g. `"batch 7 of epoch 0"`; empty if not known.
    """

    number: int
    passes: int
    graphs: int
    seconds: float
    reason: str
    where: str = ""


@dataclass
class StepProgram:
    """A step that is run many times.

    Args:
        name: of the step, for messages and dumps.
        config: the options.
        hint: where the host framework offers a place for reads, for messages.
        execution: makes the execution of one pass; `StepScope` by default.
    """

    name: str
    config: XLAConfig
    hint: str = ""
    execution: Callable[..., StepExecution] = StepScope
    passes: int = 0
    graphs: int = 0
    compile_seconds: float = 0.0
    events: list[CompileEvent] = field(default_factory=list)
    _graph_names: set[str] = field(default_factory=set)
    _seen: list[StepSignature] = field(default_factory=list)
    _signature: StepSignature | None = None
    _where: str = ""
    _open: StepExecution | None = None

    @property
    def is_open(self) -> bool:
        """Whether a pass is under way."""
        return self._open is not None and self._open.is_open

    def open(
        self,
        *,
        inputs: Any = None,
        phase: str = "step",
        seed: StepSeed | None = None,
        facts: Mapping[str, Hashable] | None = None,
        where: str = "",
    ) -> None:
        """Starts a pass.

        Args:
            inputs: the batch (any nesting of dicts, lists and tensors), to explain compiles by.
            phase: which part of the loop this is.
            seed: the pass's random stream.
            facts: further things that shape the graph.
            where: the place in the run, to announce compiles with.
        """
        self._where = where
        described = tuple(_describe("", inputs))
        self._signature = StepSignature(phase=phase, inputs=described, facts=tuple((facts or {}).items()))
        self._open = self.execution(
            name=self.name, config=self.config, seed=seed, hint=self.hint, graphs=self._graph_names
        )
        self._open.open()

    def close(self) -> ScopeReport:
        """Ends the pass: the graph is executed, and a compile is explained in the log."""
        assert self._open is not None
        report = self._open.close()
        self._open = None
        self.passes += 1
        if report.compiles:
            self._record(report)
        if self._signature is not None and self._signature not in self._seen:
            self._seen.append(self._signature)
        return report

    def abort(self) -> bool:
        """Discards the pass, if one is open; returns whether one is discarded, here or by its own `close`."""
        execution, self._open = self._open, None
        if execution is None:
            return False
        execution.abort()
        return not execution.executed

    def translate(self, error: BaseException) -> Exception | None:
        """What an error raised in the pass means, or `None` if it is not the backend's."""
        return self._open.translate(error) if self._open is not None else None

    def _record(self, report: ScopeReport) -> None:
        self.graphs += report.compiles
        self.compile_seconds += report.compile_seconds
        event = CompileEvent(
            number=self.graphs,
            passes=self.passes,
            graphs=report.compiles,
            seconds=report.compile_seconds,
            reason=self._reason(),
            where=self._where,
        )
        self.events.append(event)
        expected = self._signature is not None and all(old.phase != self._signature.phase for old in self._seen)
        logger.log(
            logging.INFO if expected else logging.WARNING,
            "%s: compiled graph %d in %.1f s (pass %d%s): %s",
            self.name,
            event.number,
            event.seconds,
            event.passes,
            f", {event.where}" if event.where else "",
            event.reason,
        )

    def _reason(self) -> str:
        assert self._signature is not None
        same_phase = [old for old in self._seen if old.phase == self._signature.phase]
        if not same_phase:
            return f"first pass of the phase {self._signature.phase!r}"
        signature = self._signature
        nearest = min(reversed(same_phase), key=lambda old: len(signature.difference(old)))
        changes = signature.difference(nearest)
        if changes:
            return "; ".join(changes)
        return (
            "the batch looks as before, so something else in the step changed: a Python value that is part of the "
            "graph, train/eval mode, frozen parameters, gradients or optimizer state that were absent before, or two "
            "scalars (a decay rate and a learning rate, say) that happen to be equal and share one input"
        )


def _describe(path: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, torch.Tensor):
        yield path or "input", f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _describe(f"{path}.{key}" if path else str(key), item)
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _describe(f"{path}[{index}]", item)
    elif value is not None:
        yield path or "input", repr(value)[:80] if isinstance(value, (bool, int, float, str)) else type(value).__name__
