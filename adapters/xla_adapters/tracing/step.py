"""`step`: marks the code of one training step in a user's loop."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, TypeVar, Unpack, overload

from xla_adapters.config import XLAConfig, XLAOptions
from xla_adapters.errors import ConfigError
from xla_adapters.runtime.rng import StepSeed, apply_process_options
from xla_adapters.tracing.graph_history import StepSignature
from xla_adapters.tracing.interrupts import at_edge
from xla_adapters.tracing.make_scope import EagerScope, LazyScope, check_lazy_mode, make_scope
from xla_adapters.tracing.step_profile import profiled
from xla_adapters.utils.location import line_of_caller

_Function = TypeVar("_Function", bound=Callable[..., Any])
_Seed = StepSeed | Callable[[], StepSeed] | None


class Step:
    """A step as a context manager and as a decorator; made by `step()`. Each entry is one call of the step."""

    def __init__(self, *, name: str | None, config: XLAConfig, seed: _Seed, hint: str) -> None:
        self._name = name
        self._config = config
        self._seed = seed
        self._hint = hint
        # Where it is: steps of one name at different places are different ones.
        self._phase = ""
        self._entered: list[AbstractContextManager[Any]] = []

    def scope(self) -> AbstractContextManager[Any]:
        """The context of the next call of the step. Adapters override it, for example to number the calls."""
        apply_process_options(self._config)
        if self._config.xla_mode == "eager":
            return EagerScope()
        if self._config.xla_mode == "lazy":
            check_lazy_mode()
            return LazyScope()
        seed = self._seed() if callable(self._seed) else self._seed
        return make_scope(
            name=self._name or "step",
            config=self._config,
            seed=seed,
            hint=self._hint,
            signature=StepSignature(phase=self._phase or line_of_caller()),
        )

    @at_edge
    def __enter__(self) -> Step:
        scope = self.scope()
        if self._config.profile_steps is not None:
            scope = profiled(scope, self._name or "step", self._phase or line_of_caller(), self._config)
        scope.__enter__()
        self._entered.append(scope)
        return self

    @at_edge
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._entered.pop().__exit__(kind, error, traceback)

    def __call__(self, function: _Function) -> _Function:
        """Decorates a function, or a generator function: then each segment from one `yield` to the next is a step."""
        if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
            raise ConfigError(
                f"{function.__name__} is asynchronous: other code would run inside the step while it awaits. "
                "Decorate a plain function and call that."
            )
        self._name = self._name or function.__name__
        # Compiled functions (of Cython, say) have none.
        code = getattr(inspect.unwrap(function), "__code__", None)
        self._phase = f"{code.co_filename}:{code.co_firstlineno}" if code else f"{function.__module__}.{self._name}"
        if inspect.isgeneratorfunction(function):
            return self._wrap_generator(function)  # type: ignore[return-value]

        @functools.wraps(function)
        def stepped(*args: Any, **kwargs: Any) -> Any:
            with self:
                return function(*args, **kwargs)

        return stepped  # type: ignore[return-value]

    def _wrap_generator(self, function: Callable[..., Generator[Any, Any, Any]]) -> Callable[..., Any]:
        @functools.wraps(function)
        def stepped(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
            generator = function(*args, **kwargs)
            resume: Callable[[], Any] = functools.partial(next, generator)
            try:
                while True:
                    with self:
                        try:
                            value = resume()
                        except StopIteration as end:
                            return end.value
                    try:
                        resume = functools.partial(generator.send, (yield value))
                    except GeneratorExit:
                        raise
                    except BaseException as error:  # noqa: BLE001 (handed on into the generator)
                        resume = functools.partial(generator.throw, error)
            finally:
                generator.close()

        return stepped


@overload
def step(function: _Function, /) -> _Function: ...


@overload
def step(
    function: None = None,
    /,
    *,
    name: str | None = None,
    config: XLAConfig | None = None,
    seed: _Seed = None,
    hint: str = "",
    **options: Unpack[XLAOptions],
) -> Step: ...


def step(
    function: Callable[..., Any] | None = None,
    /,
    *,
    name: str | None = None,
    config: XLAConfig | None = None,
    seed: _Seed = None,
    hint: str = "",
    **options: Unpack[XLAOptions],
) -> Any:
    """Marks code that is traced as one graph, compiled if it is new, and executed once at the end.

    Use it around the body of the loop, or as a decorator of the function that is the step. A
    decorated generator function is a series of steps, one from each `yield` to the next. Steps may
    nest: the inner one becomes part of the outer one's graph.

        for batch in loader:
            with xla_adapters.step():
                loss = model(**batch).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            print(loss.item())

    An exception in the body (Ctrl-C too) discards the graph: nothing of it is executed, and parameters, buffers,
    gradients and optimizer state keep their values from before the step. An optimizer's state is created when it is
    first used in a step, so that the first step is the same graph as the others.

    Args:
        function: the function, if used as a bare decorator.
        name: of the step in messages and dumps; a decorated function's own by default.
        config: the options; alternatively give those of `XLAConfig` as keywords, not both.
        seed: where the step's random numbers start, or a function that returns it at each entry; by
            default the device's stream continues.
        hint: for messages: where else a value can be read.

    Raises:
        ConfigError: an option is unknown or cannot apply.
        GraphBreakError: (in the body) something would split the graph; see its subclasses.
        GraphLimitError: (at the end) `max_graphs` would be exceeded.
    """
    config = XLAConfig.resolve(config, options)
    check_no_model_is_compiled(config)
    if config.step_replay is True:
        raise ConfigError(
            "step_replay=True: the code inside `with step()` runs at each call and cannot be skipped; make the "
            "step a function and decorate it with xla_adapters.CompiledStep(config=...)"
        )
    made = Step(name=name, config=config, seed=seed, hint=hint)
    return made if function is None else made(function)


def check_no_model_is_compiled(config: XLAConfig) -> None:
    """Raises on the mode that compiles the model, of which a hand-written step does not know.

    Raises:
        ConfigError: says how to compile it.
    """
    if config.xla_mode == "eager+dynamo":
        raise ConfigError(
            "xla_mode='eager+dynamo' is a mode of the trainers, which compile the model: compile yours with "
            "torch.compile(model, backend='openxla'), and leave xla_mode out; in a step it is a part of its graph"
        )
