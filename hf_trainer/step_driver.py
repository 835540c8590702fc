"""`StepDriver`: opens and closes the compiled steps at the events of HF's loops."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch

from xla_adapters import StepProgram, StepSeed, XLAConfig, get_runtime
from xla_adapters.replay.call_spec import CallSpec

_HINT = " (a TrainerCallback may in on_step_end, on_log and on_evaluate)"
_EVAL_HINT = f"{_HINT[:-1]}; compile_eval=False evaluates operation by operation, where everything may be read)"
_TRAIN_STREAM, _EVAL_STREAM, _REST_STREAM = 0, 1, 2


class StepDriver:
    """Opens and closes the compiled steps of one trainer: of training, evaluation and generation.

    HF's loop calls `training_step`, adds the loss to its sum, clips gradients, steps the optimizer and then calls
    `on_optimizer_step` of the callbacks. The step is opened in `training_step` and closed in that callback. So all of
    it is one graph, without a copy of the loop.

    Args:
        config: how steps are run.
        seed: of the run; the random numbers of a step depend on it and on the step's index.
    """

    def __init__(self, config: XLAConfig, seed: int) -> None:
        self.config = config
        self._seed = seed
        self._runtime = get_runtime()
        # Whether a step frees gradients depends on its phase, so `end_update` does it and not the core.
        scope_config = replace(config, free_grads=False)
        self.train = StepProgram("train_step", scope_config, hint=_HINT)
        other_config = scope_config.without_graph_limits()
        self.evaluation = StepProgram("eval_step", other_config, hint=_EVAL_HINT)
        self.generation = StepProgram("generate", other_config, hint=_EVAL_HINT)
        self._micro_step = 0
        self._eval_step = 0
        # How to go on with the present step.
        self._rest: dict[str, Any] = {}
        # `replay_works` runs a self-test, which compiles. It should not run in the first step.
        self.may_replay = config.may_replay and self._runtime.replay_works

    @property
    def is_open(self) -> bool:
        """Whether a training step is being traced."""
        return self.train.is_open

    @property
    def is_first_micro_step(self) -> bool:
        """Whether the next micro batch is the first of its update."""
        return self._micro_step == 0

    # ---- training ------------------------------------------------------------------------------

    def new_update(self) -> None:
        """A new optimizer step begins: the count of micro batches restarts."""
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
        replay: CallSpec | None = None,
    ) -> None:
        """Before the forward pass of a micro batch: opens a step, if none is open.

        Args:
            inputs: the batch.
            step: index of the optimizer step.
            updates: whether the optimizer steps after this micro batch.
            replay: the description of the call, so that it can be replayed; None to trace it.
        """
        seed = StepSeed(
            seed=self._seed,
            step=step,
            micro_step=self._micro_step,
            replica=self._runtime.device.process_index(),
            stream=_TRAIN_STREAM,
        )
        first = self._micro_step == 0
        self._micro_step += 1
        if not self.config.compiles_step or self.train.is_open:
            self._runtime.random.set_seed(seed.value())
            return
        phase = "update" if updates or self.config.accumulation == "unrolled" else "accumulate"
        facts = {"gradients": "absent" if first else "present"}
        self._rest = {"inputs": inputs, "phase": phase, "seed": replace(seed, stream=_REST_STREAM), "facts": facts}
        self.train.open(inputs=inputs, phase=phase, seed=seed, facts=facts, replay=replay)

    @contextmanager
    def between_parts(self) -> Iterator[None]:
        """For what a step does not trace, in its middle: executes what it has traced, and goes on at the exit."""
        if not self.train.is_open:
            yield
            return
        self.train.close()
        yield
        self.train.open(**self._rest)

    def around_micro_step(self) -> AbstractContextManager[Any]:
        """The context for forward and backward of a micro batch."""
        if self.config.compiles_step:
            return nullcontext()
        # Otherwise backward fails if one ran on the CPU before the runtime started (see `StepScope`).
        return torch.autograd.set_multithreading_enabled(False)

    def end_substep(self) -> None:
        """A micro batch has ended after which the optimizer does not step."""
        if self.config.xla_mode == "lazy":
            self._runtime.tracing.finish_step()
        elif self.train.is_open and self.config.accumulation == "per_micro_batch":
            self.train.close()

    def end_update(self, model: torch.nn.Module, *, free_grads: bool) -> None:
        """The optimizer has stepped: closes the step, which executes it.

        Args:
            model: the model that is trained.
            free_grads: whether to free its gradients first, so that they are not outputs of the step.
        """
        if self.config.xla_mode == "lazy":
            self._runtime.tracing.finish_step()
        elif self.is_open:
            if free_grads and not self.train.is_replaying:
                model.zero_grad(set_to_none=True)
            self.train.close()

    def abort(self) -> None:
        """Discards the open step, if there is one, with everything that was traced in it."""
        self.train.abort()
        self.evaluation.abort()
        self.generation.abort()

    def translate(self, error: BaseException) -> Exception | None:
        """The graph break that an error in an open step stands for; None if it is another error."""
        for program in (self.train, self.evaluation):
            if program.is_open:
                return program.translate(error)
        return None

    # ---- evaluation ----------------------------------------------------------------------------

    def begin_evaluation_step(self, inputs: Mapping[str, Any], phase: str, replay: CallSpec | None = None) -> None:
        """Before an evaluation batch: opens a step.

        Args:
            inputs: the batch.
            phase: name of the kind of step; each has a graph of its own.
            replay: the description of the call, so that it can be replayed; None to trace it.
        """
        seed = StepSeed(seed=self._seed, step=self._eval_step, stream=_EVAL_STREAM)
        self._eval_step += 1
        self.evaluation.open(inputs=inputs, phase=phase, seed=seed, replay=replay)
