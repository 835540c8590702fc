"""`StepDriver`: turns the events of HF's training loop into the edges of the core's steps."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch

from xla_adapters import StepProgram, StepSeed, XLAConfig, get_backend
from xla_adapters.program import ReplayRequest

_HINT = " (a TrainerCallback may in on_step_end, on_log and on_evaluate)"
_TRAIN_STREAM, _EVAL_STREAM = 0, 1


class StepDriver:
    """Opens and closes steps for one trainer.

    HF's loop calls `training_step`, adds up the loss, clips, steps the optimizer and then announces
    `on_optimizer_step`. The step is opened by the first and closed by the last of these, so all of it
    is one graph, and no line of the loop is copied.

    Args:
        config: the options.
        seed: the run's seed.
    """

    def __init__(self, config: XLAConfig, seed: int) -> None:
        self.config = config
        self._seed = seed
        self._backend = get_backend()
        # Whether gradients are freed depends on the phase, so it is decided here and not in the scope.
        scope_config = replace(config, free_grads=False, xla_mode="eager+compile")
        self.train = StepProgram("train_step", scope_config, hint=_HINT)
        self.optimizer = StepProgram("optimizer_step", scope_config, hint=_HINT)
        other_config = replace(scope_config, max_graphs=None, steps_per_execution=1)
        self.evaluation = StepProgram("eval_step", other_config, hint=_HINT)
        self.generation = StepProgram("generate", other_config, hint=_HINT)
        self._micro_step = 0
        self._eval_step = 0
        # The self-test compiles: now, and not in the first step.
        self.may_replay = config.may_replay and self._backend.replay_works

    @property
    def is_open(self) -> bool:
        """Whether a training step is being traced."""
        return self.train.is_open or self.optimizer.is_open

    @property
    def is_first_micro_step(self) -> bool:
        """Whether the micro batch to come is the first of its update."""
        return self._micro_step == 0

    # ---- training ------------------------------------------------------------------------------

    def new_update(self) -> None:
        """A new optimizer step begins: micro batches are counted from 0."""
        self._micro_step = 0
        if self.train.is_open:
            # An epoch of unknown length ended in the middle of an unrolled accumulation.
            self.train.close()

    def begin_micro_step(
        self,
        inputs: Mapping[str, Any],
        *,
        step: int,
        updates: bool,
        training: bool,
        replay: ReplayRequest | None = None,
    ) -> None:
        """A micro batch is about to be computed.

        Args:
            inputs: the batch.
            step: index of the optimizer step.
            updates: whether the optimizer steps after it.
            training: whether the model was in training mode, as a fact for explanations.
            replay: what a replay must know of the step; None to trace it.
        """
        seed = StepSeed(
            seed=self._seed,
            step=step,
            micro_step=self._micro_step,
            replica=self._backend.process_index(),
            stream=_TRAIN_STREAM,
        )
        first = self._micro_step == 0
        self._micro_step += 1
        if self.config.xla_mode != "eager+compile":
            self._backend.set_seed(seed.value())
            return
        if self.train.is_open:
            self._backend.set_seed(seed.value())
            return
        phase = "update" if updates or self.config.accumulation == "unrolled" else "accumulate"
        facts = {"gradients": "absent" if first else "present", "model mode": "train" if training else "eval"}
        self.train.open(inputs=inputs, phase=phase, seed=seed, facts=facts, replay=replay)

    def around_micro_step(self) -> AbstractContextManager[Any]:
        """What a micro step outside a compiled step needs around it."""
        if self.config.xla_mode == "eager+compile":
            return nullcontext()
        # Independent of whether a CPU backward ran before the runtime started (see StepScope).
        return torch.autograd.set_multithreading_enabled(False)

    def begin_optimizer(self, step: int) -> None:
        """Clipping and the update begin; only under dynamo are they a step of their own."""
        if self.config.xla_mode == "eager+dynamo" and not self.optimizer.is_open:
            seed = StepSeed(seed=self._seed, step=step, replica=self._backend.process_index())
            self.optimizer.open(phase="optimizer", seed=seed)

    def end_substep(self) -> None:
        """A micro batch is done that the optimizer does not follow."""
        if self.config.xla_mode == "lazy":
            self._backend.finish_step()
        elif self.train.is_open and self.config.accumulation == "per_micro_batch":
            self.train.close()

    def end_update(self, model: torch.nn.Module, *, free_grads: bool) -> None:
        """The optimizer has stepped."""
        if self.config.xla_mode == "lazy":
            self._backend.finish_step()
        elif self.is_open:
            if free_grads and not self.train.is_replaying:
                model.zero_grad(set_to_none=True)
            (self.train if self.train.is_open else self.optimizer).close()

    def abort(self) -> None:
        """Leaves nothing behind of a step that does not come to its end."""
        self.train.abort()
        self.optimizer.abort()
        self.evaluation.abort()
        self.generation.abort()

    def translate(self, error: BaseException) -> Exception | None:
        """The graph break behind an error, or `None`."""
        for program in (self.train, self.optimizer, self.evaluation):
            if program.is_open:
                return program.translate(error)
        return None

    # ---- evaluation ----------------------------------------------------------------------------

    def begin_evaluation_step(self, inputs: Mapping[str, Any], phase: str, replay: ReplayRequest | None = None) -> None:
        """An evaluation batch is about to be computed."""
        seed = StepSeed(seed=self._seed, step=self._eval_step, stream=_EVAL_STREAM)
        self._eval_step += 1
        self.evaluation.open(inputs=inputs, phase=phase, seed=seed, replay=replay)
