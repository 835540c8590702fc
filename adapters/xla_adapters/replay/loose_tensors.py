"""`loose_tensors`: what a step uses and no module has."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from xla_adapters.replay.call_spec import CallSpec
from xla_adapters.replay.guards.snapshot import ModuleSnapshot
from xla_adapters.replay.optimizer_host_math import OptimizerHostMath
from xla_adapters.tracing.undo_log import UndoLog


def loose_tensors(
    snapshot: ModuleSnapshot, spec: CallSpec, optimizers: Sequence[OptimizerHostMath], undo_log: UndoLog
) -> list[torch.Tensor]:
    """The tensors that a call uses and that are in no module and not in its batch.

    Args:
        snapshot: of the modules.
        spec: of the call.
        optimizers: that step in it.
        undo_log: of the call.
    """
    seen = set(map(id, (*snapshot.tensors, *spec.tensors.batch)))
    groups = [group["params"] for math in optimizers for group in math.optimizer.param_groups]
    leaves = (leaf for leaf, _ in undo_log.leaves())
    found = (*leaves, *(item for group in groups for item in group), *spec.constants)
    return list({id(tensor): tensor for tensor in found if id(tensor) not in seen}.values())
