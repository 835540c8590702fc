"""Gives tensors that share a buffer separate buffers, before an executable overwrites it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from xla_adapters.runtime import Runtime
from xla_adapters.tracing.undo_log import UndoLog


def own_buffers_for_update(undo_log: UndoLog, runtime: Runtime) -> list[torch.Tensor]:
    """Copies the tensors that share a buffer with those that the traced step updates. Called before it is executed.

    Args:
        undo_log: the step's.
        runtime: the runtime.

    Returns:
        The tensors that the step updates.
    """
    written, others = undo_log.pending_entries()
    copied = [entry.tensor for entry in others if not runtime.values.holds(entry.tensor, entry.value, entry.twin)]
    buffers = runtime.shared_buffers if runtime.has_shared_buffers else None
    if buffers is not None and copied:
        # They became copies in this step, and share the buffer of the tensor they were copied from.
        buffers.give_own_buffers([entry.former for entry in written], copied)
    if buffers is not None and buffers.copies_made():
        unknown = [entry for entry in written if buffers.is_unknown(entry.tensor, entry.value)]
        if unknown and buffers.give_own_buffers([entry.former for entry in unknown]):
            buffers.free_for_results([entry.former for entry in unknown], [entry.tensor for entry in unknown])
    grads = [leaf.grad for leaf, before in undo_log.leaves() if leaf.grad is not None and leaf.grad is not before]
    return [*(entry.tensor for entry in written), *(grad for grad in grads if runtime.tracing.is_pending(grad))]


def note_updated(written: Sequence[torch.Tensor], runtime: Runtime) -> None:
    """The step is executed: what it wrote has buffers of its own.

    Args:
        written: as `own_buffers_for_update` returned it.
        runtime: the runtime.
    """
    if runtime.has_shared_buffers:
        runtime.shared_buffers.note_own_buffers(written)
        runtime.shared_buffers.note_separated()
