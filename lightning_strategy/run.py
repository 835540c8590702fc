"""`Run`: one fit, validation, test or prediction of a Trainer on XLA, from its setup to its teardown."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn

from lightning_strategy.checkpoints.data_position import DataPosition
from lightning_strategy.checkpoints.exact_state import exact_state, restore_exact_state
from lightning_strategy.checkpoints.scheduled import ScheduledSaves
from lightning_strategy.connector.flops import flops_of_devices
from lightning_strategy.connector.refusals import check_nesting, check_trainer
from lightning_strategy.fit_report import FitReport
from lightning_strategy.metrics.run_metrics import RunMetrics
from lightning_strategy.replay.loops import replaying_loops
from lightning_strategy.replay.rules import ReplayRules
from lightning_strategy.sharding.module_sharding import ModuleSharding
from lightning_strategy.sharding.phases import PhaseSharding
from lightning_strategy.steps.averaged_weights import averaging_in_one_graph
from lightning_strategy.steps.backward import backward_in_step
from lightning_strategy.steps.callbacks import StepEnds, callbacks_around
from lightning_strategy.steps.driver import StepDriver
from lightning_strategy.steps.dynamo import compiled_children
from lightning_strategy.steps.evaluation import EvaluationBatches
from lightning_strategy.steps.gradients import GRADIENTS, accumulated
from lightning_strategy.steps.stall_watch import StallWatch
from lightning_strategy.steps.training import TrainingBatches
from lightning_strategy.trainer_calls import TrainerCall
from xla_adapters import XLAConfig, get_runtime
from xla_adapters.checkpoint import CheckpointConfig
from xla_adapters.errors import BreakKind
from xla_adapters.runtime.modes import eager
from xla_adapters.tracing.library_reads import answering, reads_of_packages
from xla_adapters.tracing.step_scope import current_scope
from xla_adapters.tracing.undo_log import release_retired
from xla_adapters.utils.torch_modes import TorchModes, as_if_compiling, inference_mode_as_no_grad

_active: list[Run] = []


class Run:
    """Owns everything that lasts from setup to teardown: the eager mode, the patches, and the objects below.

    Args:
        trainer: runs the loops.
        config: the options.
        sharding: of the strategy, if it shards.
        checkpoint: when to save, and what takes too long.
        report: notes where the time goes; by default none is noted.

    Attributes:
        config: the options.
        steps: opens and closes the steps.
        training: the steps of training batches.
        evaluation: the steps of evaluation batches.
        metrics: logged values and metrics.
        data: where in the training data the run is.
        stalls: watches that no step takes too long.
    """

    def __init__(
        self,
        trainer: Trainer,
        config: XLAConfig,
        sharding: ModuleSharding | None = None,
        checkpoint: CheckpointConfig | None = None,
        report: FitReport | None = None,
    ) -> None:
        self.config = config
        self._trainer = trainer
        self._call = TrainerCall(trainer)
        self._sharding = sharding
        self._checkpoint = checkpoint if checkpoint is not None else CheckpointConfig()
        self._lasting = ExitStack()
        self._load_gradients: Callable[[], None] | None = None
        self._report = report if report is not None else FitReport(False)
        self.data = DataPosition(trainer)
        self.metrics = RunMetrics(trainer, self._is_step_open, self._report.clock)
        self.steps = StepDriver(
            config.of_run(trainer.default_root_dir),
            base_seed(),
            before_step=self.metrics.before_step,
            after_step=self._after_step,
            after_discard=self.metrics.after_discard,
        )
        self.stalls = StallWatch(trainer, self._checkpoint.stall_deadline, self._is_step_open)
        phases = PhaseSharding(sharding, self._is_step_open)
        self.training = TrainingBatches(trainer, config, self.steps, phases)
        self.evaluation = EvaluationBatches(trainer, config, self.steps, phases, self.stalls)

    @property
    def _module(self) -> LightningModule:
        module = self._trainer.lightning_module
        assert module is not None
        return module

    def _after_step(self) -> None:
        self.metrics.after_step()
        self._report.step_ended()

    def _is_step_open(self) -> bool:
        return self.steps.is_open

    # ---- beginning and end ---------------------------------------------------------------------

    def begin(self) -> None:
        """Switches to the run's mode.

        Raises:
            ConfigError: another run in this process is under way with other settings.
        """
        for run in reversed(_active.copy()):
            run.end_if_left()
        check_nesting([run.config for run in _active], self.config)
        _active.append(self)
        lasting = self._lasting
        # Also where an exception has kept a hook of the strategy from restoring them.
        lasting.callback(TorchModes().restore)
        # Each backward runs in this thread, also where no step is open: see `StepScope`.
        lasting.enter_context(torch.autograd.set_multithreading_enabled(False))
        lasting.enter_context(as_if_compiling(torch.compiler._is_compiling_flag))
        lasting.callback(_active.remove, self)
        lasting.callback(release_retired)
        lasting.enter_context(eager(self.config.eager_by_default))
        lasting.enter_context(inference_mode_as_no_grad())
        lasting.enter_context(answering(reads_of_packages((), self._module)))
        lasting.enter_context(flops_of_devices())
        lasting.enter_context(self.metrics.patched())
        lasting.enter_context(averaging_in_one_graph(self.config))
        lasting.enter_context(backward_in_step(self._trainer, self.steps))
        saves = ScheduledSaves(self._checkpoint)
        lasting.callback(saves.close)
        lasting.enter_context(self.data.followed())
        lasting.enter_context(self.stalls.receiving_errors())
        # Before the callbacks of ours, whose work is not that of the user's callbacks.
        plan = str if self._sharding is None else self._sharding.summary
        lasting.enter_context(self._report.running(self._trainer, self.steps, plan))
        step_ends = StepEnds(self.steps, self.training.leaves_open)
        lasting.enter_context(callbacks_around(self._trainer, first=step_ends, last=saves))

    def end_if_left(self) -> bool:
        """Ends the run if the Trainer's method that began it was left without a teardown; returns whether it was."""
        if not self._call.has_ended:
            return False
        with ExitStack() as stack:
            stack.callback(self.end)
            self.stalls.stop()
            self.steps.abort()
        return True

    def check(self) -> None:
        """Raises on what the module and the Trainer want and a compiled step cannot do."""
        check_trainer(self._trainer, self._module, self.config)

    def model_is_ready(self, saved: dict[str, Any] | None) -> None:
        """The model is on the device and the optimizers exist.

        Args:
            saved: the exact state in the checkpoint that the run resumes from; None if it does not resume.
        """
        lasting, module = self._lasting, self._module
        self.metrics.take_snapshots_of(module)
        rules = None
        if self.steps.may_replay:
            proves = self.config.step_replay is not True
            rules = ReplayRules(self._trainer, module, self.metrics.deferred_updates, proves=proves)
            lasting.enter_context(replaying_loops(self._trainer, self.steps))
        lasting.enter_context(self.metrics.deferring(module))
        if self._sharding is not None:
            lasting.enter_context(self._sharding.holding(module))
        self.training.model_is_ready(rules)
        self.evaluation.model_is_ready(rules)
        if self.config.xla_mode == "eager+dynamo":
            lasting.enter_context(compiled_children(module, get_runtime().dynamo_backend))
        if saved is not None and self._trainer.state.fn == TrainerFn.FITTING:
            self.steps.seed = int(saved["seed"])
            restore_exact_state(saved, self.data)

    def before_teardown(self) -> None:
        """Discards a step that is still open; what the progress bar showed last becomes numbers."""
        self.stalls.stop()
        self.steps.abort()
        self.metrics.make_progress_bar_values_numbers()

    def end(self) -> None:
        """Undoes what `begin` did."""
        self._lasting.close()

    def before_upload(self) -> None:
        """A batch is about to be moved to the device."""
        training = self._trainer.training
        if training:
            self.data.before_batch()
            load_gradients, self._load_gradients = self._load_gradients, None
            if load_gradients is not None:
                load_gradients()
        self.stalls.restart()
        self.steps.before_upload(self._trainer.fit_loop.total_batch_idx + 1 if training else -1)

    # ---- checkpoints ---------------------------------------------------------------------------

    def exact_state(self, *, with_gradients: bool) -> dict[str, Any]:
        """What a checkpoint must hold for a resumed run to compute the same as this one.

        Args:
            with_gradients: between the micro batches of an update its gradients, too.
        """
        state = exact_state(self.steps.seed, self.data)
        gradients = accumulated(self._trainer, self._module) if with_gradients else {}
        return {**state, GRADIENTS: gradients} if gradients else state

    def before_save(self, path: Any) -> None:
        """A checkpoint is about to be written.

        Raises:
            CheckpointSaveError: inside a step.
        """
        self.stalls.stop()
        self.training.end_accumulation()
        scope = current_scope()
        if scope is not None:
            scope.meet_break(BreakKind.CHECKPOINT_SAVE, f"the checkpoint {os.fspath(path)}")

    def after_save(self, path: Any) -> None:
        """A checkpoint is written, or being written: the loading of the next batch is watched again."""
        self.steps.train.note_checkpoint(os.fspath(path))
        self.stalls.restart()

    def resumes_from(self, path: str) -> None:
        """Tells the Trainer which checkpoint was loaded instead of the one that it found."""
        self._trainer._checkpoint_connector._ckpt_path = path

    def resumes_gradients(self, load: Callable[[], None]) -> None:
        """Has saved gradients loaded before the first batch: the Trainer drops all gradients before it begins.

        Args:
            load: loads them.
        """
        self._load_gradients = load


def base_seed() -> int:
    """The seed of `seed_everything`, or torch's."""
    given = os.environ.get("PL_GLOBAL_SEED")
    return int(given) if given is not None else torch.initial_seed()
