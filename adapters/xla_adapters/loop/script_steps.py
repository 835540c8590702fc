"""`ScriptSteps`: the steps of a loop that does not say where they begin and end."""

from __future__ import annotations

import atexit
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch

from xla_adapters.config import XLAConfig
from xla_adapters.open_step import in_step
from xla_adapters.replay.step_program import StepProgram
from xla_adapters.runtime import get_runtime
from xla_adapters.runtime.rng import StepSeed
from xla_adapters.tracing.discarding import Discarding
from xla_adapters.tracing.library_reads import allowing_reads, reads_of_packages
from xla_adapters.utils.location import current_location, stack_frames, warn_at
from xla_adapters.utils.torch_modes import use_no_grad_for_inference_mode

# Of the random numbers on the device.
_TRAIN, _EVALUATION = 0, 1
_CALL = torch.nn.Module._call_impl.__code__


class ScriptSteps:
    """The steps of a loop that marks none.

    A step begins where a prepared loader hands out a batch, or else where a prepared model is called. In a training it
    may end once an optimizer has updated; without `backward` it may end anywhere. It ends where the loop takes the next
    batch, or reads a value.

    Args:
        config: the options.
        around: what code of a step runs in.
        hint, evaluation_hint: for messages: where values of a training step can be read, and of an evaluation's.
    """

    def __init__(
        self,
        config: XLAConfig,
        around: Callable[[], AbstractContextManager[object]],
        *,
        hint: str,
        evaluation_hint: str,
    ) -> None:
        # Gradients are the loop's: it frees them by `zero_grad`.
        self.config = replace(config, free_grads=False)
        self.train = StepProgram("train_step", self.config, hint=hint)
        self.evaluation = StepProgram("eval_step", self.config.without_graph_limits(), hint=evaluation_hint)
        # Updates, batches since the last one, and steps of evaluations since then.
        self.count = self._micro_step = self._evaluated = 0
        self._seed: int | None = None
        self._models: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._reads: Any = None
        self._make_around = around
        self._around = ExitStack()
        self._discarding: Discarding | None = None
        # What is open, and its number among all that were open.
        self._open: StepProgram | None = None
        self._ticket = 0
        self._batch: Any = None
        # Tensors that were pending when it was opened.
        self._pending = 0
        self._of_loader = self._trains = self._computes = self._may_end = False
        # The optimizers that have updated in the open step, and those that update what was called in it.
        self._updates: set[int] = set()
        self._called: set[int] = set()
        self._updated_by: weakref.WeakKeyDictionary[torch.nn.Module, set[int]] = weakref.WeakKeyDictionary()
        # Calls of models that have not returned, and whether the last read was an error.
        self._depth, self._failed = 0, False
        # A loader that is still held then would close it when the runtime is gone.
        atexit.register(_abort, weakref.ref(self))
        # Where a step of an evaluation has ended by a read, its forward may still get a backward.
        self._split = False

    # ---- what is prepared ------------------------------------------------------------------------

    def note_model(self, model: torch.nn.Module) -> None:
        """Has calls of a model belong to steps."""
        self._models.add(model)
        use_no_grad_for_inference_mode(model)
        self._reads = reads_of_packages((), torch.nn.ModuleList(self._models), of_script=True)
        watch = _ForwardWatch(self)
        model.register_forward_pre_hook(watch)
        model.register_forward_hook(watch.after)

    def note_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Has updates of an optimizer end steps."""
        self._optimizers.add(optimizer)
        self._updated_by.clear()
        optimizer.register_step_post_hook(self._updated)

    def forget(self) -> None:
        """Models and optimizers so far are those of a training that is over."""
        self.end()
        self._models.clear()
        self._optimizers.clear()

    # ---- the events of a loop --------------------------------------------------------------------

    def begin(self, batch: Any = None, *, of_loader: bool = False, phase: str = "") -> int:
        """A batch was handed out, or a model is called without one: opens a step. Returns its number.

        Args:
            batch: to explain compiles by.
            of_loader: whether a prepared loader has made it.
            phase: which part of an accumulation it is.
        """
        self.end()
        trains = torch.is_grad_enabled() and any(model.training for model in self._models)
        seed = self._next_seed(trains=trains)
        if not self.config.compiles_step or not (trains or self.config.compile_eval) or in_step():
            if not in_step():
                get_runtime().random.set_seed(seed.value())
                self._micro_step, self._evaluated = self._micro_step + trains, self._evaluated + (not trains)
            return self._ticket
        program = self.train if trains else self.evaluation
        self._discarding = Discarding(program)
        gradients = "present" if trains and self._gradients_present() else "absent"
        self._around.enter_context(allowing_reads(self._reads))
        program.open(
            inputs=batch,
            phase=(phase or "training") if trains else "evaluation",
            facts={"gradients": gradients} if trains else {},
            seed=seed,
            where=f"step {self.count}",
        )
        self._around.enter_context(self._make_around())
        self._open, self._batch, self._of_loader = program, batch, of_loader
        self._trains, self._computes, self._may_end = trains, False, not trains
        self._updates, self._called, self._depth, self._failed = set(), set(), 0, False
        self._ticket += 1
        ticket = self._ticket
        program.end_at_reads(lambda is_error: self._ends(ticket, is_error))
        self._pending = get_runtime().tracing.pending_count()
        return ticket

    def end(self, ticket: int | None = None) -> None:
        """Closes the open step, which executes it; one that computed nothing is discarded.

        Args:
            ticket: the number of the step, if its loop is left: it is discarded after an error. Another one stays open.
        """
        program = self._open
        if program is None or (ticket is not None and ticket != self._ticket):
            return
        # If the loop goes on after an error, it has caught it, and keeps what it has computed.
        if ((self._depth or self._failed) and ticket is not None) or self._is_untouched():
            self.abort()
            return
        self._open = None
        try:
            assert self._discarding is not None
            with self._discarding:
                program.close()
            if self._updates:
                self.count, self._micro_step, self._evaluated = self.count + 1, 0, 0
            elif program is self.evaluation:
                self._evaluated += 1
            else:
                self._micro_step += 1
        finally:
            self._around.close()

    def _is_untouched(self) -> bool:
        """Whether nothing was computed in the open step."""
        return not self._computes and get_runtime().tracing.pending_count() <= self._pending

    def abort(self) -> None:
        """Discards the open step."""
        program, self._open = self._open, None
        try:
            if program is not None:
                program.abort()
        finally:
            self._around.close()

    def _ends(self, ticket: int, is_error: bool) -> bool:
        """A value is read: ends the step if it may end; returns whether it has ended.

        Args:
            ticket: the number of the step.
            is_error: whether the read is one, since the step may not end.
        """
        if ticket != self._ticket or self._open is None:
            return True
        if is_error:
            # A loop over a loader may catch the error, and go on with the step. Without one nothing would end it.
            self._failed = True
            if not self._of_loader:
                self.abort()
            return False
        if self._has_failed():
            self.abort()
            return True
        if not self._may_end and not self._is_untouched():
            return False
        self._split = self._open is self.evaluation and self._computes and torch.is_grad_enabled()
        self.end()
        return True

    def before_forward(self, model: torch.nn.Module) -> None:
        """A prepared model is called."""
        if (self._open is None and not in_step()) or (self._open is not None and self._is_over(model)):
            self.begin()
        self._called |= self._updating(model)
        self._notice_errors()
        self._depth += 1
        if torch.is_grad_enabled() and self._trains:
            self._may_end = False
        elif self._trains and not self._computes:
            # In training mode, without gradients: metrics, or an evaluation that leaves the mode.
            self._may_end = True
        self._computes = True

    def after_forward(self) -> None:
        """A prepared model has returned."""
        self._depth = max(0, self._depth - 1)

    def _notice_errors(self) -> None:
        """The loop goes on with the step: it has caught the errors so far."""
        self._failed = False
        if self._has_failed():
            self._depth = 0

    def _has_failed(self) -> bool:
        """Whether a call of a prepared model did not return. Hooks are not told of errors in a step."""
        return self._depth > 0 and not any(frame.f_code is _CALL for frame in stack_frames(sys._getframe(1)))

    def _is_over(self, model: torch.nn.Module) -> bool:
        """Whether the call of a model begins another step than the open one.

        In a training it does if all that was called before, and the model, has been updated since.
        """
        if not self._trains:
            return not self._of_loader and self._computes
        return torch.is_grad_enabled() and bool(self._updates) and self._called | self._updating(model) <= self._updates

    def _updating(self, model: torch.nn.Module) -> set[int]:
        """The optimizers that update a model, by their `id`."""
        if model not in self._updated_by:
            owners = {id(parameter): id(one) for one in self._optimizers for parameter in _parameters_of(one)}
            self._updated_by[model] = {owners[id(one)] for one in model.parameters() if id(one) in owners}
        return self._updated_by[model]

    @contextmanager
    def differentiating(self) -> Iterator[None]:
        """Around a backward."""
        if self._open is None and not in_step():
            if self._split:
                text = (
                    "a value was read between forward and backward, and all models were in evaluation mode, in which "
                    "a read ends the step: forward and backward are executed apart. Call model.train(), and read "
                    "after optimizer.step()"
                )
                warn_at(current_location(), text, UserWarning)
            self.begin()
        self._notice_errors()
        self._trains = self._computes = True
        self._may_end = self._split = False
        with self.discarding():
            yield

    def _updated(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._notice_errors()
        if self._open is None:
            self.count, self._micro_step, self._evaluated = self.count + 1, 0, 0
        self._updates.add(id(optimizer))
        self._computes = self._may_end = True

    @contextmanager
    def part_of_update(self, phase: str) -> Iterator[None]:
        """Around the code of one batch of an accumulation, which may end with its last line.

        Args:
            phase: which part it is; empty if there is one.
        """
        if phase and self._open is not None and self._is_untouched():
            self.begin(self._batch, of_loader=self._of_loader, phase=phase)
        with self.discarding():
            yield
        self._may_end = True

    @contextmanager
    def discarding(self) -> Iterator[None]:
        """Discards the open step if the body raises, and raises the translated error."""
        try:
            yield
        except BaseException as error:
            self.discard(error)
            raise

    def discard(self, error: BaseException) -> None:
        """Discards the open step after an error.

        Raises:
            XLAAdapterError: the error in words of this package, if there is one.
        """
        program, self._open = self._open, None
        if program is None:
            return
        assert self._discarding is not None
        try:
            self._discarding.__exit__(type(error), error, error.__traceback__)
        finally:
            self._around.close()

    # ---- random numbers --------------------------------------------------------------------------

    def _next_seed(self, *, trains: bool) -> StepSeed:
        seed = torch.initial_seed()
        if seed != self._seed:
            # `set_seed` was called.
            self._seed, self.count, self._micro_step, self._evaluated = seed, 0, 0, 0
        stream, micro_step = (_TRAIN, self._micro_step) if trains else (_EVALUATION, self._evaluated)
        return StepSeed(seed=seed, step=self.count, micro_step=micro_step, stream=stream)

    def state(self) -> dict[str, Any]:
        """What random numbers of later steps depend on."""
        return {"steps": self.count, "micro_steps": self._micro_step, "device_seed": get_runtime().random.seed()}

    def resume(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `state` returned; the random numbers of the host are there already."""
        self._seed, self._evaluated = torch.initial_seed(), 0
        self.count, self._micro_step = int(state["steps"]), int(state["micro_steps"])
        get_runtime().random.set_seed(int(state["device_seed"]))

    def _gradients_present(self) -> bool:
        return any(parameter.grad is not None for one in self._optimizers for parameter in _parameters_of(one))


def _abort(found: weakref.ref[ScriptSteps]) -> None:
    steps = found()
    if steps is not None:
        steps.abort()


def _parameters_of(optimizer: torch.optim.Optimizer) -> Iterator[torch.nn.Parameter]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


class _ForwardWatch:
    """Tells of calls of one model. A copy of the model has the same one; in another process it does nothing."""

    def __init__(self, steps: ScriptSteps | None) -> None:
        self._steps = steps

    def __call__(self, module: torch.nn.Module, args: Any) -> None:
        if self._steps is not None:
            self._steps.before_forward(module)

    def after(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        """The model has returned."""
        if self._steps is not None:
            self._steps.after_forward()

    def __deepcopy__(self, memo: Any) -> _ForwardWatch:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _ForwardWatch, (None,)
