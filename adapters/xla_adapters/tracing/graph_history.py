"""`GraphHistory`: the graphs that a step has compiled so far, why there is another one, and whether it may be."""

from __future__ import annotations

import ast
import logging
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from xla_adapters.config import XLAConfig
from xla_adapters.errors import GraphLimitError
from xla_adapters.runtime import Runtime
from xla_adapters.tracing.compile_events import CompileEvent, tell
from xla_adapters.tracing.graph_analysis import GraphAnalyses, pending_outputs
from xla_adapters.tracing.operation_log import OperationLog
from xla_adapters.tracing.recompile_causes import common_length, explain_difference
from xla_adapters.tracing.scope_report import ScopeReport
from xla_adapters.tracing.undo_log import UndoLog
from xla_adapters.utils.location import line_of_user, place_text

logger = logging.getLogger("xla_adapters")

# Of each step; more graphs than this are explained by the latest.
_KEPT = 8
_REMEDY_OF_FACTS = (
    "keep the options of the training (accumulation, clipping, what is kept between steps) as they are from its start "
    "on, or expect one compile for each combination"
)
_SPLIT = (
    "a part of the step was executed before its end, so that the rest is a graph of its own\n"
    "  what to do: remove the graph break that a warning names, or the optimizer that runs operation by operation"
)
# `with step():` makes a new object for each call, so its steps are identified by name.
_by_name: dict[str, GraphHistory] = {}


@dataclass(frozen=True, kw_only=True)
class StepSignature:
    """What is known of a call from outside the step; calls with different signatures have different graphs.

    Attributes:
        phase: which part of the loop this is, e.g. `"update"` or `"accumulate"`.
        inputs: name, shape and dtype of each tensor of the batch; other values by their repr.
        facts: further things that shape the graph, as the adapter knows them.
    """

    phase: str = "step"
    inputs: tuple[tuple[str, str], ...] = ()
    facts: tuple[tuple[str, Hashable], ...] = ()

    @classmethod
    def of(cls, phase: str, inputs: Any, facts: Mapping[str, Hashable]) -> StepSignature:
        """Describes a call with this batch: any nesting of dicts, lists and tensors."""
        return cls(phase=phase, inputs=tuple(_describe("", inputs)), facts=tuple(facts.items()))

    def __str__(self) -> str:
        inputs = ", ".join(f"{name or 'input'}: {what}" for name, what in self.inputs[:4])
        return self.phase + (f", with {inputs}" if inputs else "")

    def difference(self, other: StepSignature) -> list[str]:
        """How this differs from an earlier signature, in words."""
        changes = []
        for mine, theirs in ((dict(self.inputs), dict(other.inputs)), (dict(self.facts), dict(other.facts))):
            for name in dict.fromkeys([*theirs, *mine]):
                before, now = theirs.get(name, "absent"), mine.get(name, "absent")
                if before != now:
                    changes.append(f"{name}: {before} -> {now}")
        return changes


@dataclass(frozen=True)
class CallNumber:
    """Which call of a step it is.

    Attributes:
        number: from 1; 0 if calls are not counted.
        where: the position in the run, e.g. `"batch 7 of epoch 0"`; empty if not known.
    """

    number: int = 0
    where: str = ""

    def __str__(self) -> str:
        return f"call {self.number}" + (f", {self.where}" if self.where else "")


@dataclass
class GraphHistory:
    """Remembers the graphs of a step.

    Attributes:
        hashes: of the graphs, where they are counted (`XLAConfig.limits_graphs`).
        known: the first call of each phase, and the latest calls that compiled: what is known from outside, and what
            they did.
        graphs: how many graphs were compiled.
        seconds: how many seconds that took.
        events: the calls that compiled.
        analyses: what the graphs read, return and compute.
    """

    hashes: set[str] = field(default_factory=set)
    known: list[tuple[StepSignature, OperationLog]] = field(default_factory=list)
    graphs: int = 0
    seconds: float = 0.0
    events: list[CompileEvent] = field(default_factory=list)
    analyses: GraphAnalyses = field(default_factory=GraphAnalyses)
    _phases: set[str] = field(default_factory=set)

    def reason(self, signature: StepSignature, operations: OperationLog) -> str:
        """Why a call compiles, compared with the most similar call of its phase that compiled."""
        return self._explain(signature, operations)[0]

    def _explain(self, signature: StepSignature, operations: OperationLog) -> tuple[str, bool]:
        """Why a call compiles, and whether something should be done about it."""
        same_phase = [item for item in reversed(self.known) if item[0].phase == signature.phase]
        if not same_phase:
            return f"first call of the phase {place_text(signature.phase)!r}", False
        nearest = min(
            same_phase, key=lambda item: (len(signature.difference(item[0])), -common_length(item[1], operations))
        )
        changes = signature.difference(nearest[0])
        if changes:
            return "; ".join(changes) + self._advice(signature, nearest[0]), True
        before = nearest[1]
        longest = max(len(before.entries), len(operations.entries))
        # Numbers alone are no cause then: the optimizer's may be anything.
        if operations.was_split and common_length(before, operations) == longest:
            return _SPLIT, True
        found = explain_difference(before, operations)
        if found is not None:
            return str(found), not found.is_harmless
        reason = (
            "the batch looks as before, and the step calls the same functions: what differs is in the backward, in "
            "code that was not called through torch's Python functions, or in what was computed before the step"
        )
        return reason, True

    def has_graph_of(self, phase: str) -> bool:
        """Whether a call of this phase has ended."""
        return phase in self._phases

    def _tell(
        self, name: str, signature: StepSignature, report: ScopeReport, call: CallNumber, known: str, warns: bool
    ) -> None:
        reason, needs_action = (known, False) if known else self._explain(signature, report.operations)
        is_first = self._note(signature, report.operations)
        own = [item for item in self.known if item[0].phase == signature.phase]
        if not is_first:
            self.known.append((signature, report.operations))
        if len(own) >= _KEPT:
            self.known.remove(own[1])
        self._note_compile(name, report, reason, call, signature.phase, warns=warns and needs_action and not is_first)

    def _note_compile(
        self, name: str, report: ScopeReport, reason: str, call: CallNumber, phase: str, *, warns: bool
    ) -> None:
        """Notes a compile, says why in the log, and tells those who listen."""
        self.graphs += report.compiles
        self.seconds += report.compile_seconds
        total = f", {self.seconds:.1f} s in all" if self.graphs > report.compiles else ""
        position = f" ({call})" if call.number else ""
        how = "loaded" if report.loads == report.compiles else "compiled"
        logger.log(
            logging.WARNING if warns else logging.INFO,
            f"{name}: {how} graph {self.graphs} in {report.compile_seconds:.1f} s{total}{position}: {reason}",
        )
        event = CompileEvent(
            step=name,
            number=self.graphs,
            call=call.number,
            graphs=report.compiles,
            loads=report.loads,
            seconds=report.compile_seconds,
            reason=reason,
            phase=phase,
            where=call.where,
            line=line_of_user(),
            graph=report.graph,
            memory=report.memory,
        )
        self.events.append(event)
        tell(event)

    def ended(
        self,
        name: str,
        signature: StepSignature,
        report: ScopeReport,
        call: CallNumber | None = None,
        known: str = "",
        *,
        warns: bool = True,
    ) -> None:
        """Notes the end of a call; if it compiled, says why in the log.

        Args:
            name: of the step.
            signature: of the call.
            report: of its end.
            call: which call it was; None if calls are not counted.
            known: why it compiled, if the caller knows; nothing need be done about that.
            warns: whether a graph after the first one of a phase is a warning.
        """
        if report.compiles:
            self._tell(name, signature, report, call if call is not None else CallNumber(), known, warns)
        elif report.operations.entries:
            # Its graph may be known from another step.
            self._note(signature, report.operations)

    def _note(self, signature: StepSignature, operations: OperationLog) -> bool:
        """Remembers the first call of each phase; returns whether it is this one."""
        if signature.phase in self._phases:
            return False
        self._phases.add(signature.phase)
        self.known.append((signature, operations))
        return True

    def _advice(self, signature: StepSignature, nearest: StepSignature) -> str:
        """Which forms each changed input had so far, and what to do."""
        before, now = dict(nearest.inputs), dict(signature.inputs)
        changed = [name for name in dict.fromkeys([*before, *now]) if before.get(name) != now.get(name)]
        if not changed:
            return f"\n  what to do: {_REMEDY_OF_FACTS}"
        seen = [
            f"{name} was {', '.join(dict.fromkeys(dict(old.inputs).get(name, 'absent') for old, _ in self.known))}"
            for name in changed
        ]
        remedy = _remedy([(before.get(name, ""), now.get(name, "")) for name in changed])
        return f"\n  so far: {'; '.join(seen)}\n  what to do: {remedy}"


def history_of(name: str) -> GraphHistory:
    """The history of the steps of this name."""
    return _by_name.setdefault(name, GraphHistory())


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


def _remedy(changes: list[tuple[str, str]]) -> str:
    """What to do about inputs that have another form, given the old and the new one: empty for one that is absent."""
    (old_shapes, old_dtypes), (shapes, dtypes) = (
        zip(*(form.rpartition(" ")[::2] for form in forms), strict=True) for forms in zip(*changes, strict=True)
    )
    if not all(old and new for old, new in changes):
        return "give the same entries in each batch, with a neutral value (weights of 1, say) where there is none"
    if not all(isinstance(getattr(torch, dtype, None), torch.dtype) for dtype in (*old_dtypes, *dtypes)):
        return "make it a tensor: its value is then an input of the graph; or choose among a few values"
    if old_shapes == shapes:
        return "convert the data to one dtype in the dataset: each dtype is a graph of its own"
    if old_dtypes == dtypes and all(map(_has_fewer_rows, old_shapes, shapes)):
        return (
            "if it is the smaller last batch of an epoch, leave it out by drop_last=True of the DataLoader "
            "(dataloader_drop_last=True of TrainingArguments), or accept one compile more: each shape is a graph of "
            "its own"
        )
    return (
        "pad to a fixed length or to a few lengths (shapes='auto' of a trainer), and drop the partial last batch "
        "(drop_last): each shape is a graph of its own"
    )


def _has_fewer_rows(before: str, now: str) -> bool:
    """Whether two shapes, as text, differ in the first size alone, and the second one is smaller."""
    old, new = ast.literal_eval(before), ast.literal_eval(now)
    return len(old) == len(new) and old[1:] == new[1:] and new < old


# ---- how many there may be --------------------------------------------------------------------------


def check_pending_graph(
    name: str,
    config: XLAConfig,
    call: tuple[StepSignature, OperationLog],
    history: GraphHistory,
    undo_log: UndoLog,
    runtime: Runtime,
) -> None:
    """Adds the pending graph at the end of a step to those seen, unless it would be one too many; if that is limited.

    torch_xla's own `max_different_graphs` compares traces, not graphs. There the first update of the weights alone
    counts as another one.

    Args:
        name: the step's, for the message.
        config: with `max_graphs` and `on_recompile`.
        call: what is known of the call from outside, and what it did.
        history: the step's graphs; a new one is added.
        undo_log: the step's.
        runtime: the runtime.

    Raises:
        GraphLimitError: it would be graph number `max_graphs + 1`, or the second one under `on_recompile="error"`.
    """
    if not config.limits_graphs:
        return
    outputs = pending_outputs(undo_log, runtime)
    # A step that computes nothing (a training step that returns None) has no graph.
    if not outputs:
        return
    check_graph(name, config, call, history, runtime.tracing.graph_hash(outputs))


def check_graph(
    name: str, config: XLAConfig, call: tuple[StepSignature, OperationLog], history: GraphHistory, graph: str
) -> None:
    """As `check_pending_graph`, of a graph whose hash is known."""
    if not config.limits_graphs or graph in history.hashes:
        return
    number = len(history.hashes) + 1
    limit = ""
    if config.max_graphs is not None and number > config.max_graphs:
        limit, remedy = f"max_graphs={config.max_graphs}", "raise max_graphs"
    elif config.on_recompile == "error" and history.has_graph_of(call[0].phase):
        limit, remedy = "on_recompile='error'", "choose on_recompile='warn'"
    if limit:
        raise GraphLimitError(
            f"the step {name!r} was about to compile graph number {number}, and {limit}: {history.reason(*call)}\n"
            f"  or {remedy}. The step was discarded; parameters are as before it."
        )
    history.hashes.add(graph)
