"""What `xla-adapters check` and `preflight` change in a trainer: the XLA steps put in, nothing saved or sent.

A pre-flight also ends the loops as soon as the graphs of their steps are there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import transformers
from transformers import TrainingArguments

from hf_trainer.mixin import XLATrainerMixin
from xla_adapters.tools.user_script import Hand
from xla_adapters.utils.location import line_of_caller

if TYPE_CHECKING:
    _Base = transformers.Trainer
else:
    _Base = object


def checked(kind: type, hand: Hand) -> type:
    """The class that is instantiated in place of a trainer's class; see `xla_adapters.tools.user_script`."""
    bases = (kind,) if issubclass(kind, XLATrainerMixin) else (XLATrainerMixin, kind)
    if len(bases) == 2:
        hand.change(f"{kind.__module__}.{kind.__qualname__} ({line_of_caller()}): its steps run on hf_trainer's")
    attributes = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "_hand": hand}
    return type(kind.__name__, (_Checked, *bases), attributes)


class _Checked(_Base):
    """Before a trainer's class: what it writes goes to a temporary folder, and checkpoints are not written."""

    _hand: Hand

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        arguments = kwargs.get("args", args[1] if len(args) > 1 else None)
        folder = str(self._hand.folder / "output")
        if arguments is None:
            kwargs["args"] = TrainingArguments(output_dir=folder)
        else:
            arguments.output_dir, arguments.report_to, arguments.push_to_hub = folder, [], False
        if self._hand.sharding is not None:
            self._hand.change(f"{type(self).__name__} ({line_of_caller()}): sharding={self._hand.sharding!r}")
            kwargs["sharding"] = self._hand.sharding
        super().__init__(*args, **kwargs)

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """As `Trainer.train`, from the beginning."""
        if resume_from_checkpoint:
            self._hand.change(f"resume_from_checkpoint={resume_from_checkpoint!r}: trains from the beginning")
        loops = self._hand.loops
        if loops is None:
            return super().train(*args, **kwargs)
        loops.train(lambda: super(_Checked, self).train(*args, **kwargs))
        if self.eval_dataset is not None:
            loops.evaluate(super().evaluate)
        return loops.end()

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """As `Trainer.evaluate`. A pre-flight evaluates after the training, and gives no metrics before."""
        loops = self._hand.loops
        if loops is None or loops.is_taking:
            return super().evaluate(*args, **kwargs)
        self._hand.change(f"{type(self).__name__}.evaluate ({line_of_caller()}): left out")
        return {}

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        self._hand.skip(f"the checkpoint of step {self.state.global_step}")

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Saves nothing."""
        self._hand.skip(f"the model ({line_of_caller()})")
