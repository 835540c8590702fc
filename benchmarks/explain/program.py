"""`Program`: a training with one planted fault, and what must be said of it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Literal

import xla_adapters

Loop = Literal["step()", "CompiledStep", "HF Trainer", "Lightning"]
MARK = "# planted: "


@dataclass(frozen=True)
class Program:
    """A program of the table. Its line is marked in its source by a comment, `# planted: NAME`.

    Attributes:
        name: of the fault.
        run: trains, in a child.
        cause: a pattern of what must be given as the cause; None for what is harmless: then nothing may be reported.
        remedy: a pattern of what must be advised.
        loop: what runs the steps. Everything outside of the steps of loops without a trainer is run eagerly.
        has_line: False where an entry of the batch or an option of the trainer is at fault: its name is in `cause`.
        graphs: how many graphs the step has if the fault is harmless.
    """

    name: str
    run: Callable[[], object]
    cause: str | None
    remedy: str = ""
    loop: Loop = "step()"
    has_line: bool = True
    graphs: int = 1

    def train(self) -> None:
        """Runs it."""
        with xla_adapters.eager() if self.loop in ("step()", "CompiledStep") else nullcontext():
            self.run()

    @property
    def planted(self) -> str:
        """`FILE:LINE` of the line that is marked.

        Raises:
            ValueError: there is none, or there are several.
        """
        file = inspect.getsourcefile(self.run)
        assert file is not None
        with open(file, encoding="utf-8") as source:
            lines = [number for number, line in enumerate(source, 1) if line.rstrip().endswith(MARK + self.name)]
        if len(lines) != 1:
            raise ValueError(f"{len(lines)} lines of {file} are marked with {MARK}{self.name}")
        return f"{file}:{lines[0]}"
