"""`OwnCode`: the user's own code in a step, examined once, and again when what it reads has changed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from xla_adapters.replay.effects import Proof
from xla_adapters.replay.facts import FunctionFacts, ReadFact
from xla_adapters.replay.outside import Knowledge, Unproven


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
        self._facts: Sequence[ReadFact | FunctionFacts] = ()
        self._look()

    def follow(self) -> None:
        """Looks again if what the code reads has changed."""
        if any(fact.changed() is not None for fact in self._facts):
            self.generation += 1
            self._look()

    def _look(self) -> None:
        if self._trusted is not None:
            self._facts = [FunctionFacts(function) for function in self._trusted]
            return
        proof = Proof(self._knowledge)
        self.obstacle = None
        try:
            self._examine(proof)
        except Unproven as error:
            self.obstacle = str(error)
        self._facts = proof.facts
