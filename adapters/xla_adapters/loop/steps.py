"""`StepDriver`: opens and closes the compiled steps of one run at the events of a trainer's loops."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch

from xla_adapters.checkpoint import Watchdog
from xla_adapters.config import XLAConfig
from xla_adapters.errors import LossError, hide_own_frames
from xla_adapters.replay.call_spec import CallSpec
from xla_adapters.replay.step_program import StepProgram
from xla_adapters.runtime import eager, get_runtime
from xla_adapters.runtime.rng import StepSeed
from xla_adapters.tracing.discarding import Discarding
from xla_adapters.tracing.undo_log import free_replaced_values
from xla_adapters.utils.location import Location
from xla_adapters.utils.torch_modes import as_if_compiling

# Streams of random numbers.
_TRAIN, _EVALUATION, _REST_OR_UPLOAD = 0, 1, 2


def _nothing() -> None: ...


class StepDriver:
    """Opens and closes the steps of one run, and seeds the device for each.

    A trainer's hooks call `begin` before a training batch is computed, and `end` after its update, or after the batch
    if it has none. What the trainer does in between (hooks, clipping, profiler scopes) is part of the step, and no line
    of its loop is copied.

    Args:
        config: the options.
        seed: the run's seed; random numbers of a step depend on it and on the step's index.
        evaluation: the names of steps that do not train.
        hint: for messages: where values of a training step can be read.
        evaluation_hint: the same for the other steps.
        before_step: called before each step: takes snapshots of what a discard restores.
        after_step: called when a step was executed.
        after_discard: called when a step was discarded.

    Attributes:
        config: the options.
        seed: the run's seed; a run that resumes may set it.
        train: the training step.
        update: the step of an update outside of a training step.
        evaluation: the steps that do not train, by name.
        may_replay: whether steps may be replayed.
    """

    def __init__(
        self,
        config: XLAConfig,
        seed: int,
        evaluation: Sequence[str],
        *,
        hint: str,
        evaluation_hint: str,
        before_step: Callable[[], None] = _nothing,
        after_step: Callable[[], None] = _nothing,
        after_discard: Callable[[], None] = _nothing,
    ) -> None:
        self.config = config
        self.seed = seed
        self._before_step = before_step
        self._after_step = after_step
        self._after_discard = after_discard
        self._runtime = get_runtime()
        # The adapters free gradients themselves, before they end a step: a step of an accumulation must keep them.
        train_config = replace(config, free_grads=False)
        evaluation_config = train_config.without_graph_limits()
        self.train = StepProgram("train_step", train_config, hint=hint)
        self.update = StepProgram("optimizer_step", train_config.unprofiled(), hint=hint)
        self.evaluation = {name: StepProgram(name, evaluation_config, hint=evaluation_hint) for name in evaluation}
        self._evaluated = 0
        self._is_computing = False
        # How to go on with the open step.
        self._rest: dict[str, Any] = {}
        # `replay_works` runs a self-test, which compiles. It should not run in the first step.
        self.may_replay = config.may_replay and self._runtime.replay_works

    @property
    def programs(self) -> tuple[StepProgram, ...]:
        """All steps."""
        return (self.train, self.update, *self.evaluation.values())

    @property
    def is_open(self) -> bool:
        """Whether a step is being traced."""
        return any(program.is_open for program in self.programs)

    # ---- training ------------------------------------------------------------------------------

    def before_upload(self, index: int) -> None:
        """Seeds the device before a batch is moved there: transforms on the device draw random numbers.

        Args:
            index: of the batch since the start of the training; -1 in an evaluation.
        """
        if not self.is_open:
            self._runtime.random.set_seed(StepSeed(seed=self.seed, step=index, stream=_REST_OR_UPLOAD).value())

    def begin(
        self,
        inputs: Any,
        *,
        step: int,
        micro_step: int = 0,
        phase: str,
        facts: Mapping[str, Hashable],
        where: str = "",
        replay: CallSpec | None = None,
    ) -> None:
        """Before a training batch is computed: opens the step, or only seeds the device.

        It is not opened if it is open already (unrolled accumulation), or if steps are not compiled.

        Args:
            inputs: the batch, to explain compiles by.
            step: index of the step since the start of the training; its random numbers depend on it.
            micro_step: index of the batch in its step; they depend on it, too.
            phase: which part of the loop this is, in words.
            facts: other values, by name, that decide the graph.
            where: the batch and epoch in words, for messages.
            replay: describes the step for a replay; None if it must be traced.
        """
        replica = self._runtime.device.process_index()
        seed = StepSeed(seed=self.seed, step=step, micro_step=micro_step, replica=replica, stream=_TRAIN)
        if not self.config.compiles_step or self.train.is_open:
            self._runtime.random.set_seed(seed.value())
            return
        self._before_step()
        self._rest = {"inputs": inputs, "phase": phase, "facts": facts, "where": where}
        self._rest["seed"] = replace(seed, stream=_REST_OR_UPLOAD)
        self.train.open(inputs=inputs, phase=phase, seed=seed, facts=facts, where=where, replay=replay)

    def begin_update(self, where: str) -> bool:
        """Opens a step for an update outside of a training step; returns whether it did."""
        if self.is_open or not self.config.compiles_step:
            return False
        self._before_step()
        self.update.open(phase="update outside a batch", where=where)
        return True

    @contextmanager
    def between_parts(self) -> Iterator[None]:
        """For what a step does not trace, in its middle: executes what it has traced, and goes on at the exit."""
        if not self.train.is_open:
            yield
            return
        self.train.close()
        yield
        self.train.open(**self._rest)

    def replayed(self) -> Any:
        """Executes the open step, which is a replay; returns the outputs that the loop returns for it."""
        with self.discarding():
            outputs = self.train.promise("outputs")
            self.train.close()
        self._after_step()
        return outputs

    def end(self, *, replays: bool = True) -> None:
        """Closes the open training step, which executes it; does nothing if it was closed before.

        Args:
            replays: whether a replayed step is executed; otherwise it is discarded, for its batch was skipped.
        """
        self._rest = {}
        if self.config.xla_mode == "lazy":
            self._runtime.tracing.finish_step()
        if self.train.is_replaying and not replays:
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
        self._evaluated = 0

    @contextmanager
    def evaluation_step(
        self, name: str, batch: Any, *, phase: str = "", where: str = "", replay: CallSpec | None = None
    ) -> Iterator[StepProgram]:
        """Around one batch of evaluation or prediction: one graph under `compile_eval`.

        Args:
            name: of the step.
            batch: to explain compiles by.
            phase: which kind of step it is; the name by default.
            where: the batch in words, for messages.
            replay: describes the step for a replay; None if it must be traced.
        """
        seed = StepSeed(seed=self.seed, step=self._evaluated, stream=_EVALUATION)
        self._evaluated += 1
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
            program.open(inputs=batch, phase=phase or name, seed=seed, where=where, replay=replay)
            with as_if_compiling():
                yield program
                program.close()
        self._after_step()

    # ---- leaving early -------------------------------------------------------------------------

    def discarding(self) -> Discarding:
        """A context that discards the open step if its body raises, and raises the translated error."""
        return Discarding(self)

    def abort(self) -> None:
        """Discards the open step, if there is one, with everything that was traced in it."""
        self._is_computing = False
        discarded = [program.abort() for program in self.programs]
        if any(discarded):
            self._after_discard()

    def translate(self, error: BaseException) -> Exception | None:
        """The error to raise in place of one that the body of a step raised; None for the same."""
        return next((program.translate(error) for program in self.programs if program.is_open), None)


@contextmanager
def around_run(config: XLAConfig) -> Iterator[None]:
    """Around a run: operations outside of steps execute at once (but under "lazy"), and backward in this thread.

    Otherwise a backward fails if one ran on the CPU before the runtime started (see `StepScope`).
    """
    with torch.autograd.set_multithreading_enabled(False), eager(config.eager_by_default):
        try:
            yield
        except BaseException as error:
            hide_own_frames(error)
            raise
        finally:
            free_replaced_values()


class StallWatch:
    """Raises if a step of a run takes too long.

    Args:
        deadline: for each step; None watches nothing.
    """

    def __init__(self, deadline: timedelta | None) -> None:
        self._watchdog = Watchdog(deadline)
        self._open = ExitStack()

    def begin(self, what: str) -> None:
        """A step begins, and is watched until `stop`.

        Args:
            what: the step in words, for the message.
        """
        self.stop()
        self._open.enter_context(self._watchdog.watch(what))

    def stop(self) -> None:
        """The step has ended."""
        self._open.close()

    def receive(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        """The loop ends, perhaps by an error: the open watchdog sees it, and knows whether it caused it."""
        return self._open.__exit__(kind, error, trace)

    def watching(self, what: str) -> AbstractContextManager[None]:
        """Around a step that is one block: raises if it takes longer than the deadline."""
        return self._watchdog.watch(what)


def check_loss(loss: object, function: Callable[..., Any]) -> None:
    """Raises if a loss is not a tensor with one element.

    Args:
        loss: what the function returned as the loss.
        function: of the user, for the message.

    Raises:
        LossError: with what was returned, and the function's file and line.
    """
    if isinstance(loss, torch.Tensor):
        if loss.numel() == 1:
            return
        found = f"a tensor of the shape {list(loss.shape)}"
        advice = "Reduce it to one number: loss.mean()"
    else:
        found = "None" if loss is None else f"a {type(loss).__name__}"
        advice = "Return the loss as a tensor with one element"
        if loss is None:
            advice += "; a model of transformers computes it if the batch has labels"
    raise LossError(f"the loss that {_described(function)} returns is {found}. {advice}")


def _described(function: Callable[..., Any]) -> str:
    plain: Any = inspect.unwrap(function)
    plain = getattr(plain, "__func__", plain)
    name, code = getattr(plain, "__qualname__", type(plain).__qualname__), getattr(plain, "__code__", None)
    if code is None:
        return name
    place = Location(filename=code.co_filename, lineno=code.co_firstlineno, function=name, is_user_code=True)
    return f"{name} ({place.place})"
