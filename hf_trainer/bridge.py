"""`Bridge`: connects one trainer to the core."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import transformers
from transformers import TrainerControl

from hf_trainer.callbacks import FirstCallback, LastCallback, XLAStatsCallback, surround
from hf_trainer.checkpoints.exact_resume import restore_rest
from hf_trainer.checkpoints.from_device import save_pretrained_from_device
from hf_trainer.checkpoints.loading import WeightLoading
from hf_trainer.checkpoints.options import check_checkpoint_options, hold_jit_checkpoint
from hf_trainer.checkpoints.resume_check import ResumeCheck
from hf_trainer.checkpoints.safe import SafeCheckpoints
from hf_trainer.checkpoints.schedule import CheckpointSchedule
from hf_trainer.checkpoints.sharded import ShardedCheckpoints
from hf_trainer.checkpoints.stores import CheckpointStores
from hf_trainer.evaluation import Evaluation
from hf_trainer.framework_patches import no_search_for_gradients
from hf_trainer.inputs import Inputs
from hf_trainer.loss_sum import LossSum
from hf_trainer.model_sharding import ModelSharding
from hf_trainer.options import TrainerOptions
from hf_trainer.placement import ParameterMoves, model_of
from hf_trainer.refusals import check_runtime
from hf_trainer.session import Session
from hf_trainer.stall_watch import StallWatch
from hf_trainer.step_driver import StepDriver
from hf_trainer.tokens import InputTokens
from hf_trainer.training_report import TrainingReport
from hf_trainer.training_steps import TrainingSteps
from xla_adapters import get_runtime, initialize
from xla_adapters.insight.run_record import RunStats
from xla_adapters.insight.times import OTHER
from xla_adapters.runtime.modes import check_mode
from xla_adapters.runtime.rng import use_random_algorithm
from xla_adapters.sharding import Sharder
from xla_adapters.tracing.discarding import Discarding
from xla_adapters.utils.torch_modes import use_no_grad_for_inference_mode


class Bridge:
    """Connects one trainer to the core: builds the parts that the hooks of `XLATrainerMixin` call.

    The parts hold the state and the logic. Each is built with what it needs; most need two things:

    - `trainer`: the trainer itself, with all overrides, also those of the user's own class;
    - `base`: `super()` of the mixin for this trainer. `base.training_step` is the method that the mixin overrides.

    Some hooks run while transformers constructs the trainer. Parts that these need are built here, the others by
    `connect`.

    Args:
        trainer: the trainer, not yet constructed.
        base: `super()` of the mixin for it.
        options: the XLA options.

    Raises:
        ConfigError, UnsupportedOptionError, RuntimeOrderError: this device or this process cannot do what the options
            ask for.
    """

    steps: StepDriver
    session: Session
    training: TrainingSteps
    tokens: InputTokens
    evaluation: Evaluation
    schedule: CheckpointSchedule

    def __init__(self, trainer: transformers.Trainer, base: Any, options: TrainerOptions) -> None:
        self.options = options
        self._trainer = trainer
        self._base = base
        # Sharding selects SPMD, which must be done before the runtime starts.
        sharder = None if options.sharding is None else Sharder(options.sharding, options.config)
        get_runtime().device.initialize()
        check_mode(options.config.xla_mode)
        check_runtime(sharder is not None)
        # Before the device draws a random number.
        self._random_algorithm = use_random_algorithm(options.config)
        self.run_stats = RunStats()
        self.report = TrainingReport(trainer, self.run_stats, enabled=options.xla_report)
        self.sharding = ModelSharding(trainer, sharder)
        self.moves = ParameterMoves()
        self.inputs = Inputs(trainer, base, sharder)
        self.watch = StallWatch(trainer, options.checkpoint)
        self.loss_sum = LossSum(trainer, base, self.report.clock)
        self.stores = CheckpointStores(trainer, options, self.sharding.devices, self._random_algorithm)
        self.checkpoints = SafeCheckpoints(trainer, base, self.stores, ResumeCheck(trainer, self.stores))
        self.sharded_checkpoints = ShardedCheckpoints(trainer, base, self.sharding)
        self.weights = WeightLoading(trainer, base)

    def connect(self) -> None:
        """Builds the remaining parts and registers the callbacks. Called when the trainer is constructed.

        Raises:
            ConfigError, UnsupportedOptionError: the checkpoint options contradict the training arguments.
        """
        trainer, base, options = self._trainer, self._base, self.options
        check_checkpoint_options(
            options.checkpoint,
            safe=options.safe_checkpoints,
            processes=trainer.args.world_size,
            in_parts=self.sharding.saves_shards,
            limit=trainer.args.save_total_limit,
        )
        # After all that may refuse the options: a trainer that cannot be made leaves the process as it is.
        initialize(eager=options.config.eager_by_default)
        save_pretrained_from_device()
        hold_jit_checkpoint(trainer.callback_handler.callbacks)
        self.steps = StepDriver(options.config.of_run(trainer.args.output_dir), trainer.args.seed)
        self.session = Session(trainer, options.config, self.steps, self.sharding)
        self.tokens = InputTokens(trainer, base, self.steps)
        self.training = TrainingSteps(trainer, base, self.steps, self.inputs, self.loss_sum, self.run_stats)
        self.evaluation = Evaluation(trainer, base, self.steps, self.inputs, self.session)
        self.schedule = CheckpointSchedule(trainer, base, options.checkpoint, self.steps, self.checkpoints)
        surround(trainer.callback_handler, FirstCallback(self), LastCallback(self), self.report.record)

    # ---- around a training -----------------------------------------------------------------------

    @contextmanager
    def training_run(self, resume_from: str | bool | None) -> Iterator[str | bool | None]:
        """Around `Trainer.train`: sets up all that a training needs, and undoes it at the exit.

        Args:
            resume_from: `resume_from_checkpoint` as the user gave it.

        Yields:
            The `resume_from_checkpoint` to train with: the path of a checkpoint that was verified.
        """
        trainer = self._trainer
        for callback in trainer.callback_handler.callbacks:
            if isinstance(callback, XLAStatsCallback):
                callback.stats = self.run_stats
        with ExitStack() as stack:
            stack.enter_context(self.report.training(self.steps, self.sharding))
            stack.enter_context(self.session.running())
            stack.enter_context(
                no_search_for_gradients(lambda: model_of(trainer), lambda: self.steps.train.left_no_gradients)
            )
            self.run_stats.start()
            stack.callback(self.run_stats.stop)
            stack.enter_context(self.schedule.training())
            yield stack.enter_context(self.checkpoints.training(resume_from))

    def training_loop(self) -> AbstractContextManager[object]:
        """Around the training loop: an error discards the open step, and ends the watch over it."""
        stack = ExitStack()
        stack.enter_context(self.loss_sum.not_filtered())
        stack.enter_context(Discarding(self.steps))
        stack.push(self.watch.end_loop)
        return stack

    # ---- events of the training loop (called by the callbacks) -------------------------------------

    def training_begins(self) -> None:
        """The model and the optimizer exist; the weights may come from a checkpoint."""
        # `model_init` has made another one since the session began.
        use_no_grad_for_inference_mode(model_of(self._trainer))
        self.sharding.training_begins()
        if self.checkpoints.resumed_from is not None:
            restore_rest(self._trainer, self.checkpoints.resumed_from)
        self.report.record.setup_ended()

    def optimizer_stepped(self) -> None:
        """The optimizer has stepped: the step ends here, before other callbacks see the model."""
        self.training.end_update()
        self.report.clock.switch(OTHER)
        self.tokens.count_queued()
        self.watch.end_step()

    def substep_ended(self) -> None:
        """A micro batch without an update has ended."""
        self.steps.end_substep()
        self.report.clock.switch(OTHER)
        self.tokens.count_queued()

    def step_is_done(self, control: TrainerControl) -> None:
        """An optimizer step and all its callbacks are done: a checkpoint may be due."""
        self.report.record.step_ended()
        self.schedule.step_is_done(control)

    def accumulation_stopped(self) -> None:
        """The loop stops between two micro batches of an update: the open step is discarded."""
        self.steps.abort()
