"""`TrainerCheckpoints`: how the strategy of the Trainer saves and loads checkpoints."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import Strategy

from lightning_strategy.checkpoints import sharded
from lightning_strategy.checkpoints.host_copy import HostCopy, on_host
from lightning_strategy.checkpoints.io import EXACT_STATE, XLAEagerCheckpointIO
from lightning_strategy.checkpoints.newest import asks_for_newest, load_newest
from lightning_strategy.checkpoints.run_settings import devices_of, settings_of, show_differences
from lightning_strategy.run import Run
from lightning_strategy.sharding.module_sharding import ModuleSharding
from lightning_strategy.steps.gradients import GRADIENTS, load_gradients
from xla_adapters import XLAConfig, get_runtime
from xla_adapters.checkpoint import CheckpointConfig, snapshot
from xla_adapters.runtime.transfers import uploading


class TrainerCheckpoints:
    """Adds to Lightning's checkpoints what an exact resume needs, and reads it back.

    Args:
        strategy: whose module and optimizers are saved, and whose `checkpoint_io` writes.
        config: the XLA options.
        checkpoint: how to save.
        sharding: of the strategy, if it shards.
    """

    def __init__(
        self, strategy: Strategy, config: XLAConfig, checkpoint: CheckpointConfig, sharding: ModuleSharding | None
    ) -> None:
        self._strategy = strategy
        self._config = config
        self._checkpoint = checkpoint
        self._sharding = sharding
        self._loaded_from: Any = ""
        self._exact_state: dict[str, Any] | None = None
        self._gradients: dict[str, torch.Tensor] = {}

    @property
    def _module(self) -> LightningModule:
        module = self._strategy.lightning_module
        assert module is not None
        return module

    # ---- saving --------------------------------------------------------------------------------

    def save(self, run: Run | None, checkpoint: dict[str, Any], path: Any, write: Callable[[Any, Any], None]) -> None:
        """Saves a checkpoint; between `run.before_save` and `run.after_save` if a run is under way.

        Args:
            run: the run under way.
            checkpoint: what Lightning saves, on the device.
            path: where to.
            write: the parent class's method, which gets a checkpoint on the host and the path.
        """
        if run is not None:
            run.before_save(path)
            resumable = "optimizer_states" in checkpoint
            checkpoint = {**checkpoint, EXACT_STATE: run.exact_state(with_gradients=resumable)}
        io = self._strategy.checkpoint_io
        if run is not None and isinstance(io, XLAEagerCheckpointIO):
            io.settings = self._settings()
            io.devices = devices_of(self._sharding)
        if self._sharding is not None and self._sharding.saves_shards:
            io = sharded.check_io(type(self._strategy).__name__, io)
            sharded.save(io, checkpoint, path, self._module, self._strategy.optimizers)
        else:
            write(HostCopy(snapshot(checkpoint)) if self._checkpoint.asynchronous else on_host(checkpoint), path)
        if run is not None:
            run.after_save(path)

    def _settings(self) -> dict[str, Any]:
        return settings_of(self._module.trainer, self._config, self._sharding)

    # ---- loading -------------------------------------------------------------------------------

    def load(
        self, run: Run | None, path: Any, read: Callable[[Any], dict[str, Any]], *, weights_only: bool | None
    ) -> dict[str, Any]:
        """Loads a checkpoint; a fit that looks for the last one resumes from the newest that is valid.

        Args:
            run: the run under way.
            path: what the Trainer found, or the user gave.
            read: the parent class's method, for a checkpoint in one file.
            weights_only: as for `torch.load`, for a sharded checkpoint.

        Raises:
            CheckpointDamagedError: it is not what was written, and the user gave its path (or none is valid).
        """

        def load(path: Any) -> dict[str, Any]:
            return sharded.read_rest(path, weights_only) if sharded.is_sharded(path) else read(path)

        if run is not None and asks_for_newest():
            path, checkpoint = load_newest(path, load)
            run.resumes_from(path)
        else:
            checkpoint = load(path)
        # What is left is what Lightning's hooks get on the CPU.
        self._exact_state, self._loaded_from = checkpoint.pop(EXACT_STATE, None), path
        self._gradients = (self._exact_state or {}).pop(GRADIENTS, {})
        return checkpoint

    def take_exact_state(self) -> dict[str, Any] | None:
        """The exact state in the checkpoint that was loaded last, once; None if there is none."""
        state, self._exact_state = self._exact_state, None
        return state

    def load_weights(self, checkpoint: Mapping[str, Any], load: Callable[[Any, bool], None], *, strict: bool) -> None:
        """Loads a checkpoint's weights into the module.

        Args:
            checkpoint: as `load` returned it.
            load: the parent class's method, for a checkpoint in one file.
            strict: as for `load_state_dict`.
        """
        if sharded.FOLDER in checkpoint:
            sharded.load_weights(checkpoint, self._module, strict=strict)
            return
        # One execution, not one for each weight.
        with uploading():
            load(checkpoint, strict)
        get_runtime().tracing.flush()

    def load_optimizers(self, run: Run | None, checkpoint: Mapping[str, Any], load: Callable[[Any], None]) -> None:
        """Loads a checkpoint's optimizer states, and gradients if it was saved in an accumulation.

        Args:
            run: the run under way; without one, accumulated gradients are left out.
            checkpoint: as `load` returned it.
            load: the parent class's method, for a checkpoint in one file.
        """
        if sharded.FOLDER in checkpoint:
            sharded.load_optimizers(checkpoint, self._module, self._strategy.optimizers)
            put_back = functools.partial(sharded.load_accumulated, checkpoint, self._module)
        else:
            with uploading():
                load(checkpoint)
            gradients, self._gradients = self._gradients, {}
            put_back = functools.partial(load_gradients, self._module, gradients)
        if run is not None:
            run.resumes_gradients(put_back)
            show_differences(self._loaded_from, self._settings(), self._sharding)
