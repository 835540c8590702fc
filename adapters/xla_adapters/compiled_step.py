"""`CompiledStep`: a training step of one's own that is traced, and then replayed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch.utils._pytree import tree_flatten

from xla_adapters.backend import get_backend
from xla_adapters.config import XLAConfig
from xla_adapters.discarding import Discarding
from xla_adapters.errors import ConfigError
from xla_adapters.nested_values import as_dicts, replaced, tensors_in
from xla_adapters.program import ReplayRequest, StepProgram
from xla_adapters.replay.code_facts import CodeFacts
from xla_adapters.replay.loop_code import own_code
from xla_adapters.replay.own_code import OwnCode
from xla_adapters.replay.values import is_simple
from xla_adapters.rng import StepSeed
from xla_adapters.transfers import uploading

_Result = TypeVar("_Result")


class CompiledStep(Generic[_Result]):
    """A function that is one training step. Its first passes are traced, the others are calls of the executable.

        @xla_adapters.CompiledStep
        def train_step(inputs, labels):
            loss = F.cross_entropy(model(inputs), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

    Models, optimizers and the tensors of their state are found while tracing; tensors among the arguments
    are the batch and are brought to the device. When something changes that the trace depends on (a shape, a
    mode, a hook, a frozen parameter, a hyper-parameter that the graph has no input for, anything that the
    function reads, ...), the pass is traced again. A function that does more than compute (prints, counts,
    steps a schedule, ...), or whose source cannot be read, is traced at each pass; with `step_replay=True`
    what it does so happens only in traced passes. Tensors it returns are detached in replayed passes.

    Args:
        function: the step.
        config: the options; `step_replay=False` traces every pass.
        seed: gives the random stream of each pass; the device's own goes on if not given.
        modules: models that the function uses without calling them.

    Raises:
        ConfigError: the options ask for a mode that has no step graph.
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
        if not config.compiles_step:
            raise ConfigError(f"a CompiledStep needs xla_mode='eager+compile' (it is {config.xla_mode!r})")
        functools.update_wrapper(self, function)
        self._function = function
        self._seed = seed
        self._modules = tuple(modules)
        # By what it is called with: what is left out has its default.
        self._codes: dict[tuple[int, tuple[str, ...]], OwnCode] = {}
        self._facts: CodeFacts | None = None
        self._generation = 0
        self.program = StepProgram(getattr(function, "__name__", "step"), config)

    @property
    def replays(self) -> int:
        """Passes that were replayed so far."""
        return self.program.replays

    @property
    def reasons(self) -> dict[str, int]:
        """Why passes were traced that might have been replayed, with how often."""
        return self.program.replay_reasons

    def verify(self) -> None:
        """Has the next pass traced, and held against those that were replayed; a warning says how it differs."""
        self.program.verify_replay()

    def __call__(self, *args: Any, **kwargs: Any) -> _Result:
        """Runs the step once.

        Args:
            *args, **kwargs: as for the function; host tensors are brought to the device first.
        """
        args, kwargs = self._on_device((args, kwargs))
        leaves, spec = tree_flatten(as_dicts((args, kwargs)))
        program = self.program
        code, change = self._follow(len(args), kwargs)
        opaque = next(
            (type(leaf).__name__ for leaf in leaves if not isinstance(leaf, torch.Tensor) and not is_simple(leaf)), None
        )
        obstacle = code.obstacle if code is not None else None
        if opaque is not None:
            obstacle = f"an argument is a {opaque}"
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
                replay=ReplayRequest(
                    key=(str(spec), key, self._generation),
                    batch=batch,
                    modules=self._modules if code is None else [*self._modules, *code.modules],
                    obstacle=obstacle,
                    change=change,
                ),
            )
            if program.is_replaying:
                result = program.promise("result")
            else:
                result = self._function(*args, **kwargs)
                program.keep("result", result)
            program.close()
        if self._facts is None and code is None:
            # As the function leaves them: those that it changes itself do not count.
            self._facts = CodeFacts(functions=[self._function], deep=False)
        return result  # type: ignore[no-any-return]

    def _follow(self, positional: int, options: Iterable[str]) -> tuple[OwnCode | None, str | None]:
        """Notes what the function reads; returns its code, if that is proven, and what has changed of it, or None."""
        called = positional, tuple(options)
        code, change = self._codes.get(called), None
        if code is not None:
            change = code.follow()
        elif self.program.config.step_replay == "auto":
            code = self._codes[called] = own_code(self._function, *called)
        elif self._facts is not None:
            change = self._facts.changed()
            self._facts = None if change is not None else self._facts
        if change is not None:
            self._generation += 1
        return code, change

    def _on_device(self, arguments: Any) -> Any:
        backend = get_backend()
        backend.initialize()
        if all(map(backend.is_backend_tensor, tensors_in(arguments))):
            return arguments
        with uploading():
            return replaced(arguments, lambda tensor: tensor.to(backend.device()))
