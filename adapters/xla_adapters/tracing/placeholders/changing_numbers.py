"""Python numbers of a step's own arithmetic that change from call to call: they become arguments of its program.

Each number is a constant of the program at first, and a call with another one compiles another program. A number that
has changed twice is an argument in later calls, and may change freely. So an annealed weight of a loss costs three more
compiles, not one for each value, and a number that changes once costs one.
"""

from __future__ import annotations

from collections.abc import Iterator

from xla_adapters.tracing.equal_numbers import becomes_input
from xla_adapters.tracing.graph_difference import common_length
from xla_adapters.tracing.graph_history import GraphHistory, StepSignature
from xla_adapters.tracing.operation_log import Call, OperationLog


def note_changed_numbers(history: GraphHistory, signature: StepSignature, operations: OperationLog) -> None:
    """Remembers where a call that compiles has other numbers than an earlier call, which does the same otherwise.

    Args:
        history: of the step.
        signature: of the call.
        operations: what it did.
    """
    changed: set[tuple[str, int]] = set()
    for earlier, known in history.known:
        if earlier.phase == signature.phase and not signature.difference(earlier):
            changed |= {(signature.phase, place) for place in _changed(known, operations)}
    history.changed_numbers.update(changed)


def changing_numbers(history: GraphHistory, phase: str) -> frozenset[int]:
    """The positions in the log of calls whose numbers are to be arguments of the program.

    Args:
        history: of the step.
        phase: of the call.
    """
    return frozenset(place for (of, place), times in history.changed_numbers.items() if of == phase and times > 1)


def _changed(before: OperationLog, now: OperationLog) -> Iterator[int]:
    """The positions in the log of calls with other numbers; none if the logs differ otherwise."""
    if len(before.entries) != len(now.entries) or common_length(before, now) != len(now.entries):
        return
    for place, (theirs, mine) in enumerate(zip(before.entries, now.entries, strict=True)):
        if (
            isinstance(theirs, Call)
            and isinstance(mine, Call)
            and theirs.numbers != mine.numbers
            and becomes_input(mine)
        ):
            yield place
