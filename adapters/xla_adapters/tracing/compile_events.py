"""`CompileEvent`: what is known of one compile; and who is told of compiles."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from xla_adapters.runtime import CompiledMemory
from xla_adapters.tracing.graph_analysis import GraphAnalysis
from xla_adapters.utils import in_bytes


@dataclass(frozen=True, kw_only=True)
class CompileEvent:
    """One call of a step that compiled a graph, or loaded it from the compile cache.

    Attributes:
        step: the name of the step.
        number: how many graphs the step has now.
        call: which call of the step it was, from 1; 0 if calls are not counted.
        graphs: how many graphs were compiled or loaded in this call.
        loads: how many of them were loaded.
        seconds: time spent compiling and loading.
        reason: why, in words.
        phase: which part of the loop it was.
        where: the position in the run, e.g. `"batch 7 of epoch 0"`; empty if not known.
        line: file and line of your code that was running; empty if there is none.
        graph: what the graph reads, returns and computes; None if it could not be looked at before it was executed.
        memory: what the executable needs, by kind; None if the runtime does not tell. Of several graphs, the largest.
        time: when it ended, in seconds since 1970.
    """

    step: str
    number: int
    call: int
    graphs: int
    seconds: float
    reason: str
    phase: str = ""
    where: str = ""
    line: str = ""
    graph: GraphAnalysis | None = None
    memory: CompiledMemory | None = None
    loads: int = 0
    time: float = field(default_factory=time.time)

    def as_dict(self) -> dict[str, Any]:
        """The attributes by name, as JSON has them."""
        memory = None if self.memory is None else {**self.memory._asdict(), "total": self.memory.total}
        return {**dataclasses.asdict(self), "memory": memory}

    def __str__(self) -> str:
        position = ", ".join(text for text in (f"call {self.call}" if self.call else "", self.where, self.line) if text)
        how = "loaded in " if self.loads == self.graphs else ""
        lines = [f"{self.step}: graph {self.number}, {how}{self.seconds:.2f} s ({position}): {self.reason}"]
        if self.graph is not None:
            lines.append(f"  {self.graph}")
        if self.memory is not None:
            kinds = ", ".join(f"{name} {in_bytes(size)}" for name, size in self.memory._asdict().items() if size)
            lines.append(f"  memory {in_bytes(self.memory.total)}: {kinds}")
        return "\n".join(lines)


_listeners: list[Callable[[CompileEvent], None]] = []


@contextmanager
def listening(listener: Callable[[CompileEvent], None]) -> Iterator[None]:
    """Until the exit, a function is told of each compile of a step in this process."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def tell(event: CompileEvent) -> None:
    """Tells all listeners of a compile."""
    for listener in tuple(_listeners):
        listener(event)
