"""`InputTokens`: counts the tokens of the training batches on the host."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import transformers

from hf_trainer.step_driver import StepDriver
from hf_trainer.user_code import overridden


class InputTokens:
    """The number that `include_num_input_tokens_seen` asks for, without reads inside a step.

    In one process it is counted from the batch on the host, before the step moves it to the device. In several
    processes transformers gathers it on the device, and an override may read there: it is called when the step has
    ended.

    Args:
        trainer: the trainer.
        base: the methods that the mixin overrides.
        steps: knows whether a step is open.
    """

    def __init__(self, trainer: transformers.Trainer, base: Any, steps: StepDriver) -> None:
        self._trainer = trainer
        self._base = base
        self._steps = steps
        self._queued: list[Mapping[str, Any]] = []

    def track(self, inputs: Mapping[str, Any]) -> None:
        """As `Trainer._track_num_input_tokens`."""
        trainer = self._trainer
        kind = str(trainer.args.include_num_input_tokens_seen)
        if kind == "no":
            return
        if trainer.args.world_size == 1 and overridden(trainer, ("_track_num_input_tokens",)) is None:
            trainer.state.num_input_tokens_seen += _count(inputs, trainer.model, trainer.processing_class, kind)
            return
        self._queued.append(inputs)
        if not self._steps.is_open:
            self.count_queued()

    def count_queued(self) -> None:
        """A step has ended: counts its batches."""
        queued, self._queued = self._queued, []
        for inputs in queued:
            self._base._track_num_input_tokens(inputs)


def _count(inputs: Mapping[str, Any], model: Any, processing_class: Any, kind: str) -> int:
    """The tokens of a batch.

    Args:
        inputs: the batch, its tensors on the host.
        model: its `main_input_name` names the input to count.
        processing_class: its `pad_token_id` identifies padding if there is no attention mask.
        kind: `"all"` or `"non_padding"`.
    """
    main = inputs.get(getattr(model, "main_input_name", "input_ids"))
    if main is None:
        return 0
    if kind == "non_padding":
        mask = inputs.get("attention_mask")
        if mask is not None:
            return int(mask.sum())
        pad = getattr(processing_class, "pad_token_id", None)
        if pad is not None:
            return int((main != pad).sum())
    return int(main.numel())
