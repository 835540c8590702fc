"""`CompiledStep`: a user's function as a training step that is traced first, and then replayed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch.utils._pytree import tree_flatten

from xla_adapters.config import XLAConfig
from xla_adapters.errors import ConfigError
from xla_adapters.replay.call_spec import CallSpec, batch_reason
from xla_adapters.replay.safety import MODULE_CALLS, Analysis, Batch, FrameworkModel, Unsafe, Value, nothing
from xla_adapters.replay.step_program import StepProgram
from xla_adapters.replay.tracked_code import TrackedCode
from xla_adapters.runtime import get_runtime
from xla_adapters.runtime.rng import StepSeed
from xla_adapters.runtime.transfers import uploading
from xla_adapters.tracing.compile_events import CompileEvent
from xla_adapters.tracing.discarding import Discarding
from xla_adapters.tracing.step import check_no_model_is_compiled
from xla_adapters.utils.nested_values import as_dicts, replaced, tensors_in

_Result = TypeVar("_Result")
_FRAMEWORK = FrameworkModel(
    calls=MODULE_CALLS,
    properties=dict.fromkeys(("device", "dtype"), nothing),
    methods=frozenset({"update", "compute"}),
)


class CompiledStep(Generic[_Result]):
    """A function that is one training step. Its first calls are traced, later ones run the executable.

        @xla_adapters.CompiledStep
        def train_step(inputs, labels):
            loss = F.cross_entropy(model(inputs), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

    Models, optimizers and their state are found while tracing. Tensors among the arguments are the batch, and are
    copied to the device. When something changes that the graph depends on (a shape, a mode, a hook, a frozen
    parameter, a hyper-parameter that is no input of the graph, anything that the function reads, ...), the call is
    traced again. A function with side effects (it prints, counts, steps a scheduler, ...), or whose source cannot be
    read, is traced at each call. With `step_replay=True` it is replayed all the same, and its side effects happen in
    traced calls only. Tensors that it returns are detached in replayed calls.

    Args:
        function: the step.
        config: the options; with `step_replay=False` every call is traced.
        seed: returns where the random numbers of each call start; by default the device's stream continues.
        modules: models that the function uses without calling them.

    Raises:
        ConfigError: the options ask for a mode that has no step graph, or is one of the trainers.
    """

    def __init__(
        self,
        function: Callable[..., _Result],
        *,
        config: XLAConfig | None = None,
        seed: Callable[[], StepSeed] | None = None,
        modules: Sequence[torch.nn.Module] = (),
    ) -> None:
        config = config if config is not None else XLAConfig()
        check_no_model_is_compiled(config)
        if not config.compiles_step:
            raise ConfigError(f"a CompiledStep needs xla_mode='eager+compile' (it is {config.xla_mode!r})")
        functools.update_wrapper(self, function)
        self._function = function
        self._seed = seed
        self._modules = tuple(modules)
        # By the number of positional arguments and the names of the others: those not given have their defaults.
        self._codes: dict[tuple[int, tuple[str, ...]], TrackedCode] = {}
        self.program = StepProgram(getattr(function, "__name__", "step"), config)

    @property
    def replays(self) -> int:
        """How many calls were replayed so far."""
        return self.program.replays

    @property
    def reasons(self) -> dict[str, int]:
        """Why calls were traced that might have been replayed, with how often."""
        return self.program.replay_reasons

    @property
    def events(self) -> list[CompileEvent]:
        """The calls that compiled: why, how long, and what the graph needs."""
        return self.program.events

    def verify(self) -> None:
        """Has the next call traced and compared with its replay; `on_replay_mismatch` says what a difference causes."""
        self.program.verify_replay()

    def __call__(self, *args: Any, **kwargs: Any) -> _Result:
        """Runs the step once.

        Args:
            *args, **kwargs: as for the function; tensors on the host are copied to the device first.
        """
        args, kwargs = self._on_device((args, kwargs))
        leaves, spec = tree_flatten(as_dicts((args, kwargs)))
        program = self.program
        code = self._follow(len(args), kwargs)
        batch = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        key = tuple(
            (leaf.shape, leaf.dtype, leaf.requires_grad) if isinstance(leaf, torch.Tensor) else repr(leaf)
            for leaf in leaves
        )
        seed = self._seed() if self._seed is not None else None
        with Discarding(program):
            program.open(
                inputs=(args, kwargs),
                seed=seed,
                replay=CallSpec(
                    key=(str(spec), key, tuple(kwargs), code.generation),
                    batch=batch,
                    modules=[*self._modules, *code.modules],
                    constants=code.tensors,
                    reason=code.reason or batch_reason((args, kwargs)),
                    change=code.change,
                    look_again=code.look_again,
                ),
            )
            if program.is_replaying:
                result = program.promise("result")
            else:
                result = self._function(*args, **kwargs)
                program.keep("result", result)
            program.close()
        return result  # type: ignore[no-any-return]

    def _follow(self, positional: int, options: Iterable[str]) -> TrackedCode:
        """The function's code, analysed for such a call."""
        called = positional, tuple(options)
        if called in self._codes:
            self._codes[called].follow()
        else:
            is_promised = self.program.config.step_replay != "auto"
            self._codes[called] = _tracked(self._function, *called, is_promised=is_promised)
        return self._codes[called]

    def _on_device(self, arguments: Any) -> Any:
        runtime = get_runtime()
        runtime.device.initialize()
        if all(map(runtime.device.owns, tensors_in(arguments))):
            return arguments
        with uploading():
            return replaced(arguments, lambda tensor: tensor.to(runtime.device.torch_device()))


def _tracked(
    function: Callable[..., object], positional: int, options: Sequence[str], *, is_promised: bool
) -> TrackedCode:
    """The analysis of a step's code.

    Args:
        function: the step.
        positional: how many positional arguments it is called with.
        options: the names of the keyword arguments.
        is_promised: whether the user promises that it is safe, so that it is not analysed.
    """

    def examine(analysis: Analysis) -> None:
        batch = Value((Batch(),))
        try:
            returned = analysis.examine(function, [batch] * positional, dict.fromkeys(options, batch))
            analysis.check_returned(returned)
        except Unsafe as error:
            name = getattr(function, "__qualname__", type(function).__qualname__)
            raise Unsafe(f"{name} is not known to be safe to leave out: {error}") from None

    return TrackedCode(_FRAMEWORK, examine, promised=[function] if is_promised else None)
