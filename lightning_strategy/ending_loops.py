"""`EndingLoops`: a Trainer whose loops a pre-flight ends as soon as the graphs of their steps are there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import lightning as L

from xla_adapters.tools.user_script import Hand
from xla_adapters.utils.location import line_of_caller

if TYPE_CHECKING:
    _TrainerBase = L.Trainer
else:
    _TrainerBase = object


class EndingLoops(_TrainerBase):
    """Before a Trainer's class. Without a pre-flight its loops are as always."""

    _hand: Hand

    def _run_stage(self) -> Any:
        loops = self._hand.loops
        if loops is None:
            return super()._run_stage()
        if self.training:
            loops.train(self.fit_loop.run)
            # The sanity check is the validation loop, with all that a validation calls before and after it.
            self.num_sanity_val_steps = 1
            loops.evaluate(self._run_sanity_check)
            return loops.end()
        self._hand.change(f"trainer.{self.state.fn} ({line_of_caller()}): left out")
        return []

    def _teardown(self) -> None:
        # It would bring the weights to the host, and they have no values.
        if self._hand.loops is None:
            super()._teardown()
