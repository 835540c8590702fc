"""`FabricCheckpoints`: how the strategy of Fabric saves and loads the user's state."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from lightning.fabric.strategies.strategy import Strategy
from torch.optim import Optimizer

from lightning_strategy.checkpoints import sharded
from lightning_strategy.checkpoints.host_copy import on_host
from lightning_strategy.checkpoints.io import EXACT_STATE
from lightning_strategy.checkpoints.run_settings import show_differences
from lightning_strategy.fabric.steps import FabricSteps
from lightning_strategy.sharding.module_sharding import ModuleSharding
from xla_adapters import get_runtime
from xla_adapters.errors import BreakKind
from xla_adapters.runtime.transfers import uploading
from xla_adapters.tracing.step_scope import current_scope

_Filters = dict[str, Callable[[str, Any], bool]]


class FabricCheckpoints:
    """Adds random numbers to a state that is saved with an optimizer, and restores them when it is loaded.

    Args:
        strategy: whose `checkpoint_io` writes and reads.
        steps: of the strategy.
        sharding: of the strategy, if it shards.
    """

    def __init__(self, strategy: Strategy, steps: FabricSteps, sharding: ModuleSharding | None) -> None:
        self._strategy = strategy
        self._steps = steps
        self._sharding = sharding

    def save(self, path: Any, state: dict[str, Any], storage_options: Any, filters: _Filters) -> None:
        """Saves a copy of the state on the host; under `checkpoints="sharded"` a folder of shards.

        Args:
            path: of the file, or of the folder.
            state: as the user gave it.
            storage_options: of the user, for the `checkpoint_io`.
            filters: by key of a module, a function that says which entries of its state dict are saved.

        Raises:
            CheckpointSaveError: called inside a step.
        """
        scope = current_scope()
        if scope is not None:
            scope.meet_break(BreakKind.CHECKPOINT_SAVE, f"the checkpoint {os.fspath(path)}")
        saves_shards = self._sharding is not None and self._sharding.saves_shards
        whole = {key: value for key, value in state.items() if not saves_shards or not _is_sharded(value)}
        converted = self._strategy._convert_stateful_objects_in_state(whole, filter=filters)
        if _is_resumable(state):
            converted[EXACT_STATE] = self._steps.random_state()
        io = self._strategy.checkpoint_io
        if saves_shards:
            io = sharded.check_io(type(self._strategy).__name__, io)
            sharded.save_objects(io, state, converted, path, filters)
        else:
            io.save_checkpoint(checkpoint=on_host(converted), path=path, storage_options=storage_options)

    def load(
        self,
        path: Any,
        state: Any,
        load: Callable[[Any, Any, bool, bool | None], dict[str, Any]],
        *,
        strict: bool,
        weights_only: bool | None,
    ) -> dict[str, Any]:
        """Loads a checkpoint into the user's objects; returns the entries that the user did not ask for.

        Args:
            path: of the file, or of the folder.
            state: as the user gave it.
            load: the parent class's method, for a checkpoint in one file.
            strict, weights_only: of the user.
        """
        if isinstance(state, dict) and sharded.is_sharded(path):
            remainder = sharded.load_objects(state, path, strict=strict, weights_only=weights_only)
        else:
            with uploading():
                remainder = load(path, state, strict, weights_only)
            get_runtime().tracing.flush()
        if state and not isinstance(state, (torch.nn.Module, Optimizer)):
            random_state = remainder.pop(EXACT_STATE, None)
            if random_state is not None and _is_resumable(state):
                self._steps.resume(random_state)
                show_differences(path, None, self._sharding)
        return remainder


def _is_sharded(value: Any) -> bool:
    return isinstance(value, (torch.nn.Module, Optimizer))


def _is_resumable(state: dict[str, Any]) -> bool:
    return any(isinstance(value, Optimizer) for value in state.values())
