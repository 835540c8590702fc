"""`StepDriver`: opens and closes the core's steps as the events of Lightning's loops demand."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

from xla_adapters import StepProgram, StepSeed, XLAConfig, get_runtime
from xla_adapters.replay.call_spec import CallSpec
from xla_adapters.tracing.discarding import Discarding
from xla_adapters.utils.torch_modes import as_if_compiling

_TRAIN_HINT = " (in on_train_batch_end, or in an on_..._epoch_end hook)"
_EVAL_HINT = " (in on_..._batch_end or on_..._epoch_end; compile_eval=False runs evaluation steps eagerly)"
_TRAIN_STREAM, _EVAL_STREAM, _UPLOAD_STREAM = 0, 1, 2


class StepDriver:
    """Opens and closes the steps of one run, and seeds the device for each.

    The strategy's `on_train_batch_start` opens a training step. It is closed after the update (automatic optimization)
    or at the end of the batch (accumulation, manual optimization). Hooks, gradient clipping and profiler scopes in
    between are part of the step, and no line of a loop is copied.

    Args:
        config: the options.
        seed: the run's seed.
        before_step: called before each step: takes snapshots of what a discard restores.
        after_step: called when a step was executed.
        after_discard: called when a step was discarded.

    Attributes:
        seed: the run's seed; a run that resumes sets it.
        train: the training step.
        update: the step of an update outside of a training step.
        evaluation: the steps `"validation_step"`, `"test_step"` and `"predict_step"`.
        may_replay: whether steps may be replayed.
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
        self._runtime = get_runtime()
        # The strategy frees gradients itself, in the update: a step of an accumulation must keep them.
        train_config = replace(config, free_grads=False)
        eval_config = train_config.without_graph_limits()
        self.train = StepProgram("train_step", train_config, hint=_TRAIN_HINT)
        self.update = StepProgram("optimizer_step", train_config.unprofiled(), hint=_TRAIN_HINT)
        self.evaluation = {
            name: StepProgram(name, eval_config, hint=_EVAL_HINT)
            for name in ("validation_step", "test_step", "predict_step")
        }
        self._eval_batches = 0
        self._is_computing = False
        self.may_replay = config.may_replay and self._runtime.replay_works

    # ---- training ------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """Whether a step is being traced."""
        return any(program.is_open for program in self._programs())

    def before_upload(self, index: int) -> None:
        """Seeds the device before a batch is moved there: transforms on the device draw random numbers.

        Args:
            index: of the batch since the start of the training; -1 in an evaluation.
        """
        if not self.is_open:
            self._runtime.random.set_seed(StepSeed(seed=self.seed, step=index, stream=_UPLOAD_STREAM).value())

    def begin_batch(
        self,
        batch: Any,
        *,
        index: int,
        phase: str,
        facts: Mapping[str, Hashable],
        where: str,
        replay: CallSpec | None = None,
    ) -> None:
        """Opens the training step, or only seeds the device if it is open or steps are not compiled.

        Args:
            batch: to explain compiles by.
            index: of the batch since the start of the training; the step's random numbers depend on it.
            phase: which part of the loop this is, in words.
            facts: other values, by name, that decide the graph.
            where: the batch and epoch in words, for messages.
            replay: describes the step for a replay; None if it must be traced.
        """
        seed = StepSeed(seed=self.seed, step=index, stream=_TRAIN_STREAM)
        if not self.config.compiles_step or self.train.is_open:
            self._runtime.random.set_seed(seed.value())
            return
        self._before_step()
        self.train.open(inputs=batch, phase=phase, seed=seed, facts=facts, where=where, replay=replay)

    def replayed(self) -> Any:
        """Executes the open step, which is a replay; returns the outputs that the loop returns for it."""
        with self.discarding():
            outputs = self.train.promise("outputs")
            self.train.close()
        self._after_step()
        return outputs

    def begin_update(self, where: str) -> bool:
        """Opens a step for an update outside of a training step; returns whether it did."""
        if self.is_open or not self.config.compiles_step:
            return False
        self._before_step()
        self.update.open(phase="update outside a batch", where=where)
        return True

    def end_batch(self) -> None:
        """Closes the step of a training batch, unless it was closed after the update."""
        if self.config.xla_mode == "lazy":
            self._runtime.tracing.finish_step()
        if self.train.is_replaying:
            # Nothing was executed: the batch was skipped.
            self.train.abort()
        for program in (self.update, self.train):
            if program.is_open:
                with self.discarding():
                    program.close()
                self._after_step()

    def computing(self) -> AbstractContextManager[object]:
        """Around user code in a step (`training_step`, a backward). Inside another one it does nothing."""
        if self._is_computing:
            return nullcontext()
        with ExitStack() as stack:
            stack.enter_context(self.discarding())
            stack.callback(setattr, self, "_is_computing", False)
            self._is_computing = True
            stack.enter_context(as_if_compiling())
            return stack.pop_all()

    # ---- evaluation ----------------------------------------------------------------------------

    def begin_evaluation(self) -> None:
        """Counts the batches of an evaluation from 0."""
        self._eval_batches = 0

    @contextmanager
    def evaluation_step(
        self, name: str, batch: Any, where: str, replay: CallSpec | None = None
    ) -> Iterator[StepProgram]:
        """Around one batch of evaluation or prediction: one graph under `compile_eval`.

        Args:
            name: `"validation_step"`, `"test_step"` or `"predict_step"`.
            batch: to explain compiles by.
            where: the batch in words, for messages.
            replay: describes the step for a replay; None if it must be traced.
        """
        seed = StepSeed(seed=self.seed, step=self._eval_batches, stream=_EVAL_STREAM)
        self._eval_batches += 1
        program = self.evaluation[name]
        if not (self.config.compiles_step and self.config.compile_eval) or program.is_open:
            self._runtime.random.set_seed(seed.value())
            with as_if_compiling():
                yield program
            if self.config.xla_mode == "lazy":
                self._runtime.tracing.finish_step()
            return
        self._before_step()
        with self.discarding():
            program.open(inputs=batch, phase=name, seed=seed, where=where, replay=replay)
            with as_if_compiling():
                yield program
                program.close()
        self._after_step()

    # ---- leaving early -------------------------------------------------------------------------

    def discarding(self) -> Discarding:
        """A context that discards the open step if its body raises, and raises the translated error."""
        return Discarding(self)

    def abort(self) -> None:
        """Discards the open step, if there is one."""
        self._is_computing = False
        discarded = [program.abort() for program in self._programs()]
        if any(discarded):
            self._after_discard()

    def translate(self, error: BaseException) -> Exception | None:
        """The error to raise in place of one that the body of a step raised; None for the same."""
        for program in self._programs():
            if program.is_open:
                return program.translate(error)
        return None

    def _programs(self) -> tuple[StepProgram, ...]:
        return (self.train, self.update, *self.evaluation.values())
