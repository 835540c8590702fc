"""`keep_switches` and `restore_state`: what a step puts back at its end, and what it puts back if it is discarded."""

from __future__ import annotations

from contextlib import ExitStack

import torch

from xla_adapters.errors import UnsupportedOptionError
from xla_adapters.runtime import Runtime
from xla_adapters.tracing.undo_log import UndoLog


def keep_switches(runtime: Runtime, restores: ExitStack) -> None:
    """Has the present switches of the runtime set again when `restores` is closed.

    Raises:
        UnsupportedOptionError: the runtime has no lazy tensors, whose switches they are.
    """
    if runtime.has_placeholders:
        raise UnsupportedOptionError(
            f"StepScope: with {runtime.name} the scope of a step is an object of another class; use xla_adapters.step()"
        )
    tracing = runtime.tracing
    restores.callback(tracing.set_graph_name, tracing.graph_name())
    restores.callback(tracing.set_execution_allowed, tracing.execution_allowed())
    restores.callback(tracing.set_eager, tracing.eager())
    restores.callback(tracing.set_constant_scalars, tracing.constant_scalars())


def restore_state(runtime: Runtime, undo_log: UndoLog, seeds: tuple[int, torch.Tensor] | None) -> None:
    """Discards the pending graph of a step, and restores the state from before it.

    Args:
        runtime: the runtime.
        undo_log: the step's, with those of steps inside it.
        seeds: of the device and the host before the step; None if the step had not come to note them.
    """
    eager = runtime.tracing.eager()
    # Reading the state of a tensor may update its views, which is an operation to be discarded with the rest.
    runtime.tracing.set_eager(False)
    try:
        # From here on, each use of a tensor that the step made raises; restoring gradients of such leaves too.
        with torch._C.DisableTorchFunction():
            undo_log.undo(discard=True)
    finally:
        runtime.tracing.set_eager(eager)
    if seeds is not None:
        # The device's seed too: otherwise it would be a value of the discarded graph.
        runtime.random.set_seed(seeds[0])
        torch.set_rng_state(seeds[1])
    # Cached casts of weights are values of the discarded graph as well.
    torch.clear_autocast_cache()
