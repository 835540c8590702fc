"""`XLATrainerMixin`: makes any trainer derived from transformers' Trainer run its steps through the core."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from hf_trainer.arguments import (
    XLAArguments,
    resolve_checkpoint,
    resolve_config,
    resolve_safe_checkpoints,
    resolve_sharding,
)
from hf_trainer.callbacks import FirstCallback, LastCallback, XLAStatsCallback
from hf_trainer.checkpoint_hooks import CheckpointHooks
from hf_trainer.evaluation_hooks import EvaluationHooks
from hf_trainer.framework_patches import no_search_for_gradients, trainer_patches
from hf_trainer.refusals import check_arguments, check_optimizer, check_runtime
from hf_trainer.safe_checkpoints import SafeCheckpointHooks
from hf_trainer.schedule_hooks import ScheduleHooks, check_checkpoint_options, hold_jit_checkpoint
from hf_trainer.sharded_checkpoints import ShardedCheckpointHooks
from hf_trainer.sharding_hooks import ShardingHooks
from hf_trainer.step_driver import StepDriver
from hf_trainer.training_hooks import TrainingHooks
from xla_adapters import XLAConfig, get_backend
from xla_adapters.checkpoint import CheckpointConfig
from xla_adapters.discarding import Discarding
from xla_adapters.modes import eager
from xla_adapters.random_algorithm import use_random_algorithm
from xla_adapters.rollback import release_retired
from xla_adapters.run_stats import RunStats
from xla_adapters.sharding import ShardingConfig
from xla_adapters.sharding.sharder import Sharder


class XLATrainerMixin(
    ScheduleHooks,
    TrainingHooks,
    EvaluationHooks,
    SafeCheckpointHooks,
    CheckpointHooks,
    ShardedCheckpointHooks,
    ShardingHooks,
):
    """Put it before a class derived from `transformers.Trainer`.

        class MyTrainer(XLATrainerMixin, SomebodysTrainer): ...

    Args:
        *args, **kwargs: as for the class it is mixed into.
        xla_args: the XLA options as `XLAArguments` or `XLAConfig`, or singly:
        xla_mode, on_graph_break, compile_eval, max_graphs, free_grads, accumulation, step_replay,
        rng_algorithm, steps_per_execution: see `XLAConfig`.
        auto_sharding: shards the model over all devices, as is planned to cost least. The batch sizes of
            `TrainingArguments` are those of all devices together (as transformers has it under SPMD).
        sharding: the same by name (`"dp"`, `"fsdp"`, `"tp"`, `"2d"`, `"auto"`) or as a `ShardingConfig`.
        safe_checkpoints: checkpoints are committed by a `CheckpointStore` and checked when resumed from, which is the
            default; False leaves both to transformers, as it is in several processes.
        checkpoint: when else to save them and how, as a `CheckpointConfig` or its options: in the background, before
            the process is ended, after a time, with a deadline for what hangs.

    Raises:
        ConfigError: an XLA option is not valid, or given twice.
        UnsupportedOptionError: a training argument cannot work on XLA.
    """

    def __init__(
        self,
        *args: Any,
        xla_args: XLAArguments | XLAConfig | None = None,
        xla_mode: str | None = None,
        on_graph_break: str | None = None,
        compile_eval: bool | None = None,
        max_graphs: int | None = None,
        free_grads: bool | str | None = None,
        accumulation: str | None = None,
        step_replay: bool | str | None = None,
        steps_per_execution: int | None = None,
        rng_algorithm: str | None = None,
        auto_sharding: bool | Mapping[str, Any] | None = None,
        sharding: str | Mapping[str, Any] | ShardingConfig | None = None,
        safe_checkpoints: bool | None = None,
        checkpoint: CheckpointConfig | Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self.xla_config = resolve_config(
            xla_args,
            {
                "xla_mode": xla_mode,
                "on_graph_break": on_graph_break,
                "compile_eval": compile_eval,
                "max_graphs": max_graphs,
                "free_grads": free_grads,
                "accumulation": accumulation,
                "step_replay": step_replay,
                "steps_per_execution": steps_per_execution,
                "rng_algorithm": rng_algorithm,
            },
        )
        self.sharding_config = resolve_sharding(xla_args, auto_sharding=auto_sharding, sharding=sharding)
        self.safe_checkpoints = resolve_safe_checkpoints(xla_args, safe_checkpoints)
        self.checkpoint_config = resolve_checkpoint(xla_args, checkpoint)
        self._backend = get_backend()
        self._sharder = None if self.sharding_config is None else Sharder(self.sharding_config, self.xla_config)
        self._backend.initialize()
        check_runtime(self._sharder is not None)
        # Before anything is drawn on the device.
        self._random_algorithm = use_random_algorithm(self.xla_config)
        given = kwargs.get("args", args[1] if len(args) > 1 else None)
        if given is not None:
            check_arguments(given, self.xla_config)
        check_optimizer((kwargs.get("optimizers") or (None, None))[0], kwargs.get("optimizer_cls_and_kwargs"))
        self._in_session = False
        self._held = ExitStack()
        self.run_stats = RunStats()
        self._queued_for_counting = []
        with trainer_patches():
            super().__init__(*args, **kwargs)
        check_checkpoint_options(
            self.checkpoint_config,
            safe=self.safe_checkpoints,
            processes=self.args.world_size,
            in_parts=self._saves_parts,
            limit=self.args.save_total_limit,
        )
        hold_jit_checkpoint(self.callback_handler.callbacks)
        self._steps = StepDriver(self.xla_config, self.args.seed)
        self._last_callback = LastCallback(self)
        self.callback_handler.callbacks.insert(0, FirstCallback(self))

    # ---- a run -----------------------------------------------------------------------------------

    @contextmanager
    def _session(self) -> Iterator[None]:
        """The patches and the eager mode that a run needs; nests, and undoes itself."""
        if self._in_session:
            yield
            return
        with ExitStack() as stack:
            stack.callback(setattr, self, "_in_session", False)
            self._in_session = True
            stack.enter_context(trainer_patches())
            stack.enter_context(eager(self.xla_config.eager_by_default))
            stack.enter_context(self._sharded())
            if self.xla_config.xla_mode == "eager+dynamo":
                stack.enter_context(self._dynamo())
            try:
                yield
            finally:
                self._steps.abort()
                release_retired()

    @contextmanager
    def _dynamo(self) -> Iterator[None]:
        model: Any = self._live_model
        model.compile(backend=self._backend.dynamo_backend)
        try:
            yield
        finally:
            model._compiled_call_impl = None

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As `Trainer.train`."""
        # Callbacks added since the construction stand before the last one again.
        callbacks = self.callback_handler.callbacks
        if self._last_callback in callbacks:
            callbacks.remove(self._last_callback)
        callbacks.append(self._last_callback)
        for callback in callbacks:
            if isinstance(callback, XLAStatsCallback):
                callback.stats = self.run_stats
        quick = no_search_for_gradients(lambda: self._live_model, lambda: self._steps.train.left_no_gradients)
        with self._session(), quick:
            self.run_stats.start()
            try:
                return super().train(*args, **kwargs)
            finally:
                self.run_stats.stop()

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """As `Trainer.evaluate`."""
        with self._session():
            metrics: dict[str, float] = super().evaluate(*args, **kwargs)
        return metrics

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """As `Trainer.predict`."""
        with self._session():
            return super().predict(*args, **kwargs)

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        with Discarding(self._steps):
            return super()._inner_training_loop(*args, **kwargs)
