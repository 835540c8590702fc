"""`Program`: what a trace computes. Equal programs are compiled once in a process."""

from __future__ import annotations

import hashlib
import re
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import torch

from xla_adapters.runtime import Runtime
from xla_adapters.runtime.interface.placeholders import Run

_ARGUMENT = re.compile(r"%arg(\d+)\b")
# Executables kept; the one that was not used for longest is dropped.
_KEPT = 256
# What ranks do together; all must launch such a program.
_TOGETHER = re.compile(r"stablehlo\.(?:all_|reduce_scatter|collective_)")
_RETURN = re.compile(r"^ {4}return (.*) : ", re.MULTILINE)


@dataclass(eq=False)
class Program:
    """What a trace computes.

    Attributes:
        runtime: the runtime.
        text: StableHLO.
        arguments: placeholders.
        results: of the trace: for each changed tensor, for each new one, and the state of the random stream.
        changed: the positions of those inputs that get another value. Their arguments are donated.
        made: the tensors that get a value.
        draws: whether the state of the random stream is the last argument and the last result.
    """

    runtime: Runtime
    text: str
    arguments: list[torch.Tensor]
    results: list[torch.Tensor]
    changed: list[int]
    made: list[torch.Tensor]
    draws: bool

    @cached_property
    def key(self) -> str:
        """Equal for equal programs."""
        return hashlib.sha256(f"{self.changed} {self.text}".encode()).hexdigest()

    @cached_property
    def has_collectives(self) -> bool:
        """Whether it computes with values of other ranks."""
        return _TOGETHER.search(self.text) is not None

    def compiled(self, name: str) -> Run:
        """The executable.

        Args:
            name: for profiles.
        """
        known = executables_of_the_process(self.runtime)
        if self.key not in known:
            known[self.key] = self.runtime.placeholders.compile(self.results, self.arguments, self.changed, name)
            if len(known) > _KEPT:
                known.popitem(last=False)
        known.move_to_end(self.key)
        return known[self.key]


@cache
def executables_of_the_process(runtime: Runtime) -> OrderedDict[str, Run]:
    """Those compiled so far, by key, the one that was used last at the end."""
    return OrderedDict()


def returned_values(text: str) -> Sequence[str]:
    """The name of each result of a program; that of an argument is `%arg` with its position."""
    main = text[text.index("func.func @main") if "func.func @main" in text else 0 :]
    found = _RETURN.search(main)
    assert found is not None, text
    return found[1].split(", ")


def unused_arguments(text: str) -> set[int]:
    """The positions of the arguments that a program does nothing with but return them, in their own place.

    One that is overwritten is none of them, though the program does not read it either.
    """
    main = text[text.index("func.func @main") if "func.func @main" in text else 0 :]
    # Each is named in the list of arguments, too.
    counts = Counter(int(number) for number in _ARGUMENT.findall(main[: main.index("\n  }")]))
    returned = returned_values(text)
    return {place for place, name in enumerate(returned) if name == f"%arg{place}" and counts[place] == 2}
