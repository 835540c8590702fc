"""`ReplayedCall`: a call of a step that runs the executable of an earlier call instead of the step's Python."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_unflatten

from xla_adapters.errors import DeviceOutOfMemoryError, TensorReadError
from xla_adapters.open_step import open_step
from xla_adapters.replay.batch_reads import NUMBERS, ReadsOfReplay
from xla_adapters.replay.launcher import Launcher
from xla_adapters.replay.number_inputs import HostUpdate, Number
from xla_adapters.replay.tensor_places import CallTensors, Computed, TensorPlace
from xla_adapters.runtime import Runtime
from xla_adapters.runtime.rng import StepSeed
from xla_adapters.tracing.interrupts import InterruptGuard, at_edge
from xla_adapters.tracing.scope_report import NOTHING_COMPILED, ScopeReport


@contextmanager
def without_collecting() -> Iterator[None]:
    """Disables Python's cyclic garbage collector in the context.

    A replayed call makes two tensors for each parameter and each tensor of the optimizer's state. Reference counting
    frees them at the end of the call. But so many new objects trigger collections, which find all of them in use and
    promote them to the oldest generation, whose collection takes long.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class PendingOutput(torch.Tensor):
    """A tensor that a replayed call returns before it is computed. Any use until then raises."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", str(func))
        raise TensorReadError(
            f"{name}: the step that computes this tensor has not ended yet, or failed. Use it after the step, or set "
            "step_replay=False to have the step traced at each call."
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return "<tensor of a step that has not ended>"


class ReplayedCall:
    """One call of a step, replayed. The executable is called by `close`.

    Args:
        name: of the step, for messages.
        launcher: what to call.
        tensors: of this call.
        updates: the optimizers' host math of this call.
        numbers: inputs of the graph that are other numbers than in the call before, with their values.
        seed: where the random numbers of this call start; by default the device's stream continues.
        runtime: the runtime.
        done: called when the executable was called.
        reads: what the step reads of its batch.

    Attributes:
        stepping: the host math of the optimizers that step in it.
    """

    def __init__(
        self,
        name: str,
        launcher: Launcher,
        *,
        tensors: CallTensors,
        updates: Sequence[HostUpdate],
        numbers: Sequence[tuple[Number, float]],
        seed: StepSeed | None,
        runtime: Runtime,
        done: Callable[[], None],
        reads: ReadsOfReplay | None = None,
    ) -> None:
        self._name = name
        self._launcher = launcher
        self.stepping = launcher.call.host.optimizers
        self._tensors = tensors
        self._updates = updates
        self._numbers = numbers
        self._seed = seed
        self._runtime = runtime
        self._done = done
        self._reads = reads
        self._pending: list[tuple[torch.Tensor, int]] = []
        self._restores = ExitStack()
        self._interrupts = InterruptGuard()
        self._emptied: Optimizer | None = None
        self._groups: list[dict[str, Any]] = []
        self._depth = 0
        self._is_open = False
        self._executed = False

    @property
    def is_open(self) -> bool:
        """Whether the call has been opened and neither closed nor aborted."""
        return self._is_open

    @property
    def launcher(self) -> Launcher:
        """What is called."""
        return self._launcher

    @property
    def executed(self) -> bool:
        """Whether the executable was called."""
        return self._executed

    @at_edge
    def open(self) -> None:
        """Begins the call. Optimizers that step in it update nothing: the executable does."""
        self._interrupts.install()
        self._is_open = True
        self._restores.callback(setattr, open_step, "is_replay", open_step.is_replay)
        open_step.is_replay = True
        if self.stepping:
            self._restores.callback(register_optimizer_step_pre_hook(self._empty).remove)
            self._restores.callback(register_optimizer_step_post_hook(self._refill).remove)

    @at_edge
    def _empty(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Takes the parameters out of an optimizer's groups before it steps."""
        math = next((math for math in self.stepping if math.optimizer is optimizer), None)
        if math is not None:
            # `super().step()` of a subclass calls the hooks a second time.
            self._depth += 1
            if self._depth == 1:
                idle = math.idle_groups()
                self._emptied, self._groups = optimizer, optimizer.param_groups
                optimizer.param_groups = idle

    @at_edge
    def _refill(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if any(math.optimizer is optimizer for math in self.stepping):
            self._depth -= 1
            if not self._depth:
                self._restore_groups()

    def _restore_groups(self) -> None:
        if self._emptied is not None:
            self._emptied.param_groups = self._groups
            self._emptied, self._groups = None, []

    def promise(self, name: str) -> Any:
        """The value that the step returns under a name. Its tensors are `PendingOutput` until `close`."""
        returned = self._launcher.call.returned[name]
        leaves: list[Any] = []
        for leaf in returned.leaves:
            if isinstance(leaf, TensorPlace):
                leaves.append(leaf.get(self._tensors))
            elif isinstance(leaf, tuple):
                leaves.append(leaf[0])
            elif isinstance(leaf, Computed):
                assert self._reads is not None
                leaves.append(self._reads.value(leaf, lambda: self.promise(NUMBERS), self._runtime))
            else:
                tensor = self._like_output(leaf)
                tensor.__class__ = PendingOutput
                self._pending.append((tensor, leaf))
                leaves.append(tensor)
        return tree_unflatten(leaves, returned.spec)

    def _like_output(self, index: int) -> torch.Tensor:
        """A new tensor with the shape and dtype of an output. Its values do not matter."""
        return torch._to_functional_tensor(self._runtime.lazy.inner(self._launcher.call.outputs[index]))

    @at_edge
    def close(self) -> ScopeReport:
        """Calls the executable and stores its results where the step stores them."""
        if not self._is_open:
            return NOTHING_COMPILED
        try:
            with without_collecting(), torch.no_grad(), torch._C.DisableTorchFunction():
                return self._execute()
        finally:
            self._interrupts.finish()

    def _execute(self) -> ScopeReport:
        launcher, runtime, tensors = self._launcher, self._runtime, self._tensors
        self._restores.close()
        self._restore_groups()
        runtime.random.set_seed(runtime.random.seed() if self._seed is None else self._seed.value())
        inputs = launcher.inputs(tensors, self._numbers, runtime)
        # The next traced call is compared with the numbers that the inputs have now.
        launcher.call.updates = list(self._updates)
        runtime.tracing.compute(inputs)
        launcher.own_buffers(inputs, tensors, runtime)
        results = launcher.run(inputs, runtime)
        self._executed = True
        self._done()
        launcher.write_back(results, tensors, runtime)
        for tensor, index in self._pending:
            tensor.__class__ = torch.Tensor
            runtime.values.write([tensor], [results[index]])
        if self._reads is not None:
            self._reads.ended(executed=True)
        for update in self._updates:
            update.advance()
        launcher.compiled = runtime.counters.executables_compiled()
        launcher.call.remember_outputs(results)
        self._is_open = False
        runtime.executables.finish_run()
        return NOTHING_COMPILED

    @at_edge
    def abort(self) -> None:
        """Discards the call; does nothing if the executable was called."""
        if self._is_open:
            self._is_open = False
            self._restores.close()
            # Needed if the optimizer's own step has raised.
            self._restore_groups()
            if self._reads is not None:
                self._reads.ended(executed=False)
            self._interrupts.finish()

    def translate(self, error: BaseException) -> Exception | None:
        """The error to raise in place of one of the runtime's; `None` for an error of another kind."""
        if self._runtime.device.is_out_of_memory(error):
            return DeviceOutOfMemoryError.of_step(self._name, self._runtime.device.hardware())
        return None
