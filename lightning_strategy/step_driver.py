"""`StepDriver`: turns the events of Lightning's loops into the edges of the core's steps."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from xla_adapters import StepProgram, StepSeed, XLAConfig, get_backend
from xla_adapters.compiling import as_if_compiling
from xla_adapters.discarding import Discarding
from xla_adapters.program import ReplayRequest

_TRAIN_HINT = " (in on_train_batch_end, or in an on_..._epoch_end hook)"
_EVAL_HINT = " (in on_..._batch_end or on_..._epoch_end; compile_eval=False runs evaluation steps eagerly)"
_TRAIN_STREAM, _EVAL_STREAM, _UPLOAD_STREAM = 0, 1, 2


class StepDriver:
    """Opens and closes steps for one run of a Trainer.

    A training step is opened by the strategy's `on_train_batch_start` and closed behind the update
    (automatic optimization) or at the end of the batch (accumulating, manual optimization). So hooks,
    gradient clipping and profiler scopes in between are part of it, and no line of a loop is copied.

    Args:
        config: the options.
        seed: the run's seed.
        before_step: called before each step: keeps what is to be put back if the step is discarded.
        after_step: called when a step was executed.
        after_discard: called when a step was discarded.
    """

    def __init__(
        self,
        config: XLAConfig,
        seed: int,
        *,
        before_step: Callable[[], None],
        after_step: Callable[[], None],
        after_discard: Callable[[], None],
    ) -> None:
        self.config = config
        self.seed = seed
        self._before_step = before_step
        self._after_step = after_step
        self._after_discard = after_discard
        self._backend = get_backend()
        # Whether gradients are freed depends on the phase, so it is decided here and not in the scope.
        train_config = replace(config, free_grads=False, xla_mode="eager+compile")
        eval_config = replace(train_config, max_graphs=None, steps_per_execution=1)
        self.train = StepProgram("train_step", train_config, hint=_TRAIN_HINT)
        self.update = StepProgram("optimizer_step", train_config, hint=_TRAIN_HINT)
        self.evaluation = {
            name: StepProgram(name, eval_config, hint=_EVAL_HINT)
            for name in ("validation_step", "test_step", "predict_step")
        }
        self._eval_batches = 0
        self.may_replay = config.may_replay and self._backend.replay_works

    # ---- training ------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """Whether a step is being traced."""
        return any(program.is_open for program in self._programs())

    def before_upload(self, index: int) -> None:
        """A batch is about to be moved to the device (and perhaps augmented there).

        Args:
            index: of the batch since the start of the training.
        """
        if not self.is_open:
            self._backend.set_seed(StepSeed(seed=self.seed, step=index, stream=_UPLOAD_STREAM).value())

    def begin_batch(
        self,
        batch: Any,
        *,
        index: int,
        phase: str,
        facts: Mapping[str, Hashable],
        where: str,
        replay: ReplayRequest | None = None,
    ) -> None:
        """A training batch is about to be computed.

        Args:
            batch: to explain compiles by.
            index: of the batch since the start of the training; the random stream's name.
            phase: which part of the loop this is.
            facts: further things that shape the graph.
            where: the place in the run, for messages.
            replay: what a replay must know of the step; None to trace it.
        """
        seed = StepSeed(seed=self.seed, step=index, stream=_TRAIN_STREAM)
        if self.config.xla_mode != "eager+compile" or self.train.is_open:
            self._backend.set_seed(seed.value())
            return
        self._before_step()
        self.train.open(inputs=batch, phase=phase, seed=seed, facts=facts, where=where, replay=replay)

    def replayed(self) -> Any:
        """Executes the replayed step under way; returns what the loop hands out for it."""
        with self.discarding():
            outputs = self.train.promise("outputs")
            self.train.close()
        self._after_step()
        return outputs

    def begin_update(self, where: str) -> bool:
        """The optimizer is about to step; returns whether that began a step of its own."""
        if self.is_open or not self.config.compiles_step:
            return False
        self._before_step()
        self.update.open(phase="update outside a batch", where=where)
        return True

    @contextmanager
    def dynamo_update(self, where: str) -> Iterator[None]:
        """Clipping and update under dynamo: one graph of their own."""
        self._before_step()
        with self.discarding():
            self.update.open(phase="update", where=where)
            yield
            self.update.close()
        self._after_step()

    def end_batch(self) -> None:
        """The training batch is computed: the step ends, if it has not ended behind the update."""
        if self.config.xla_mode == "lazy":
            self._backend.finish_step()
        if self.train.is_replaying:
            # The batch was skipped.
            self.train.abort()
        for program in (self.update, self.train):
            if program.is_open:
                with self.discarding():
                    program.close()
                self._after_step()

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Around the user's own part of a step."""
        with self.discarding(), self._traced():
            yield

    @staticmethod
    @contextmanager
    def _traced() -> Iterator[None]:
        # Backward in this thread also where no step is open: see StepScope.
        with as_if_compiling(), torch.autograd.set_multithreading_enabled(False):
            yield

    # ---- evaluation ----------------------------------------------------------------------------

    def begin_evaluation(self) -> None:
        """An evaluation begins: its batches are counted from 0."""
        self._eval_batches = 0

    @contextmanager
    def evaluation_step(
        self, name: str, batch: Any, where: str, replay: ReplayRequest | None = None
    ) -> Iterator[StepProgram]:
        """Around one batch of evaluation or prediction: one graph under `compile_eval`.

        Args:
            name: `"validation_step"`, `"test_step"` or `"predict_step"`.
            batch: to explain compiles by.
            where: the place in the run, for messages.
            replay: what a replay must know of the step; None to trace it.
        """
        seed = StepSeed(seed=self.seed, step=self._eval_batches, stream=_EVAL_STREAM)
        self._eval_batches += 1
        program = self.evaluation[name]
        if not (self.config.compiles_step and self.config.compile_eval) or program.is_open:
            self._backend.set_seed(seed.value())
            with as_if_compiling():
                yield program
            if self.config.xla_mode == "lazy":
                self._backend.finish_step()
            return
        self._before_step()
        with self.discarding():
            program.open(inputs=batch, phase=name, seed=seed, where=where, replay=replay)
            with self._traced():
                yield program
                program.close()
        self._after_step()

    # ---- leaving early -------------------------------------------------------------------------

    def discarding(self) -> Discarding:
        """Discards the step under way if the body raises, and raises what the error means in a step."""
        return Discarding(self)

    def abort(self) -> None:
        """Leaves nothing behind of a step that does not come to its end."""
        discarded = [program.abort() for program in self._programs()]
        if any(discarded):
            self._after_discard()

    def translate(self, error: BaseException) -> Exception | None:
        """What an error raised in a step means, or `None`."""
        for program in self._programs():
            if program.is_open:
                return program.translate(error)
        return None

    def _programs(self) -> tuple[StepProgram, ...]:
        return (self.train, self.update, *self.evaluation.values())
