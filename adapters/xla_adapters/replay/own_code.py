"""`OwnCode`: the user's own code in a step, examined once, and again when what it reads has changed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from xla_adapters.replay.effects import Proof
from xla_adapters.replay.outside import Knowledge, Unproven
from xla_adapters.replay.read_facts import Fact, FunctionFacts, holds_contents

# Steps in a row before each of which something had changed, until it is taken for something that always does.
_UNSTEADY = 8
# Steps until that is tried again.
_PAUSE = 32


@dataclass
class _Drops:
    """How many recordings were dropped, of whatever step, since something had changed that they depend on."""

    count: int = 0


_drops = _Drops()


def recording_dropped() -> None:
    """Something has changed that no code reads (a module was replaced, say): all code is examined again."""
    _drops.count += 1


class OwnCode:
    """The user's own code in one kind of step.

    Args:
        knowledge: of the framework around it.
        examine: hands its functions to a proof.
        trusted: functions that need not be shown to be without effects; then nothing is examined, but what
            these read is followed all the same.

    Attributes:
        obstacle: what a replay would leave out, and where it stands; None if nothing.
        generation: how often what the code reads has changed.
        modules: that it was seen to use.
        change: what the code reads that had changed when it was followed last, or None.
    """

    def __init__(
        self,
        knowledge: Knowledge,
        examine: Callable[[Proof], None],
        *,
        trusted: Sequence[Callable[..., object]] | None = None,
    ) -> None:
        self._knowledge = knowledge
        self._examine = examine
        self._trusted = trusted
        self.obstacle: str | None = None
        self.generation = 0
        self.modules: Sequence[torch.nn.Module] = ()
        self.change: str | None = None
        self._facts: Sequence[Fact] = ()
        self._changes = 0
        self._pause = 0
        self._look()

    def follow(self) -> str | None:
        """Looks again if what the code reads has changed; returns what did, or None."""
        self.change = None
        if self._pause:
            self._pause -= 1
            if not self._pause:
                self._changes = _UNSTEADY - 1
                self.generation += 1
                self._look()
            return None
        self.change = next((change for fact in self._facts if (change := fact.changed()) is not None), None)
        if self.change is None:
            self._changes = 0
            if self._drops != _drops.count:
                self._look()
            return None
        self._changes += 1
        self.generation += 1
        if self._changes < _UNSTEADY or self._trusted is not None:
            self._look()
        else:
            # To record each step anew costs more than to trace it.
            self._pause = _PAUSE
            self.obstacle = self.obstacle or f"before each of {_UNSTEADY} steps in a row, {self.change}"
        return self.change

    def _look(self) -> None:
        self._drops = _drops.count
        if self._trusted is not None:
            self._facts = [FunctionFacts(function) for function in self._trusted]
            return
        proof = Proof(self._knowledge)
        self.obstacle = None
        try:
            self._examine(proof)
        except Unproven as error:
            self.obstacle = str(error)
        except RecursionError:
            self.obstacle = "a replay would leave out what its code may do beside tensors: it nests too deeply"
        # Code that is refused may well fill a list from step to step: what that holds would be kept alive for nothing.
        self._facts = [fact for fact in proof.facts if self.obstacle is None or not holds_contents(fact)]
        self.modules = proof.modules
