"""`ReplayPass`: a pass that calls the executable of an earlier one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_unflatten

from xla_adapters.backend import Backend
from xla_adapters.errors import DeviceOutOfMemoryError
from xla_adapters.interrupts import InterruptGuard, at_edge
from xla_adapters.replay.foresight import Update
from xla_adapters.replay.garbage import without_collecting
from xla_adapters.replay.number import Number
from xla_adapters.replay.places import PassTensors, Place
from xla_adapters.replay.promised import PromisedTensor
from xla_adapters.replay.recording import Recording
from xla_adapters.replay.together import StepsTogether
from xla_adapters.rng import StepSeed
from xla_adapters.step_scope import ScopeReport


class ReplayPass:
    """One pass without its Python: the executable is called when the pass is closed.

    Args:
        name: of the step, for messages.
        recording: what to call.
        tensors: of this pass.
        updates: the host's part of the optimizers' updates.
        numbers: the graph's inputs that are new because of them.
        seed: the random stream of this pass; the device's own stream goes on if not given.
        backend: the seam.
        done: called when the executable was called.
        together: where the pass waits to be executed with others; None if it does not.
    """

    def __init__(
        self,
        name: str,
        recording: Recording,
        *,
        tensors: PassTensors,
        updates: Sequence[Update],
        numbers: Sequence[tuple[Number, float]],
        seed: StepSeed | None,
        backend: Backend,
        done: Callable[[], None],
        together: StepsTogether | None = None,
    ) -> None:
        self._name = name
        self._recording = recording
        self._tensors = tensors
        self._updates = updates
        self._numbers = numbers
        self._seed = seed
        self._backend = backend
        self._done = done
        self._together = together
        self._promised: list[tuple[torch.Tensor, int]] = []
        self._restores = ExitStack()
        self._interrupts = InterruptGuard()
        self._emptied: Optimizer | None = None
        self._groups: list[dict[str, Any]] = []
        self._depth = 0
        self._is_open = False
        self._executed = False

    @property
    def is_open(self) -> bool:
        """Whether the pass has been opened and neither closed nor aborted."""
        return self._is_open

    @property
    def recording(self) -> Recording:
        """What is called."""
        return self._recording

    @property
    def executed(self) -> bool:
        """Whether the executable was called, or will be whatever comes."""
        return self._executed

    @at_edge
    def open(self) -> None:
        """Begins the pass. Optimizers that step in it update nothing: the executable does."""
        self._interrupts.install()
        self._is_open = True
        if self._recording.recipes:
            self._restores.callback(register_optimizer_step_pre_hook(self._empty).remove)
            self._restores.callback(register_optimizer_step_post_hook(self._refill).remove)

    @at_edge
    def _empty(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        recipe = next((recipe for recipe in self._recording.recipes if recipe.optimizer is optimizer), None)
        if recipe is not None:
            # `super().step()` in a class of its own comes here once more.
            self._depth += 1
            if self._depth == 1:
                idle = recipe.idle_groups()
                self._emptied, self._groups = optimizer, optimizer.param_groups
                optimizer.param_groups = idle

    @at_edge
    def _refill(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if any(recipe.optimizer is optimizer for recipe in self._recording.recipes):
            self._depth -= 1
            if not self._depth:
                self._put_groups_back()

    def _put_groups_back(self) -> None:
        if self._emptied is not None:
            self._emptied.param_groups = self._groups
            self._emptied, self._groups = None, []

    def promise(self, name: str) -> Any:
        """A value that the step hands out, before it is computed."""
        kept = self._recording.kept[name]
        leaves: list[Any] = []
        for leaf in kept.leaves:
            if isinstance(leaf, Place):
                leaves.append(leaf.get(self._tensors))
            elif isinstance(leaf, tuple):
                leaves.append(leaf[0])
            else:
                tensor = torch._to_functional_tensor(self._backend.inner(self._recording.outputs[leaf]))
                tensor.__class__ = PromisedTensor
                self._promised.append((tensor, leaf))
                leaves.append(tensor)
        return tree_unflatten(leaves, kept.spec)

    @at_edge
    def close(self) -> ScopeReport:
        """Calls the executable and puts its results where the step puts them."""
        if not self._is_open:
            return ScopeReport(compiles=0, compile_seconds=0.0)
        try:
            with (
                without_collecting(),
                torch.no_grad(),
                torch._C.DisableTorchFunction(),
                self._recording.rows_held,
            ):
                return self._execute()
        finally:
            self._interrupts.finish()

    def _execute(self) -> ScopeReport:
        recording, backend, tensors = self._recording, self._backend, self._tensors
        self._restores.close()
        self._put_groups_back()
        backend.set_seed(backend.seed() if self._seed is None else self._seed.value())
        if self._together is not None:
            return self._wait(self._together)
        inputs = recording.inputs(tensors, self._numbers, backend)
        # The next trace is held against the numbers that the graph's inputs have now.
        recording.updates = list(self._updates)
        backend.compute(inputs)
        recording.own_buffers(inputs, tensors, backend)
        results = recording.run(inputs, backend)
        self._executed = True
        self._done()
        recording.write_back(results, tensors, backend)
        for tensor, index in self._promised:
            tensor.__class__ = torch.Tensor
            backend.write([tensor], [results[index]])
        for update in self._updates:
            update.advance()
        recording.compiled = backend.executables_compiled()
        recording.take_outputs(results)
        self._is_open = False
        backend.finish_replayed()
        return ScopeReport(compiles=0, compile_seconds=0.0)

    def _wait(self, together: StepsTogether) -> ScopeReport:
        self._is_open = False
        self._executed = True
        self._done()
        report = together.add(self._recording, self._tensors, self._updates, self._promised)
        self._backend.finish_replayed()
        return report

    @at_edge
    def abort(self) -> None:
        """Leaves without a trace, if the executable was not called yet."""
        if self._is_open:
            self._is_open = False
            self._restores.close()
            # Where the optimizer's own step has raised.
            self._put_groups_back()
            self._interrupts.finish()

    def translate(self, error: BaseException) -> Exception | None:
        """What an error raised in the pass means, or `None` if it is not the backend's."""
        if self._backend.is_out_of_memory(error):
            return DeviceOutOfMemoryError.of_step(self._name, self._backend.hardware())
        return None
