"""`Bridge`: connects one trainer to the core."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import transformers
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import CallbackHandler

from hf_trainer.checkpoints import CheckpointStores, SafeCheckpoints
from hf_trainer.data import DeviceLoader, Inputs
from hf_trainer.generation import TrainerSteps
from hf_trainer.model import ModelSharding, ParameterMoves, model_of
from hf_trainer.options import TrainerOptions, check_checkpoint_options, check_runtime, hold_jit_checkpoint
from hf_trainer.patches import no_search_for_gradients
from hf_trainer.resume import ResumedCounts, restore_rest
from hf_trainer.saving import ShardedCheckpoints, WeightLoading, save_pretrained_from_device
from hf_trainer.shapes import TrainerShapes
from hf_trainer.steps import Evaluation, Session, TrainingSteps, make_steps
from xla_adapters import get_runtime, initialize
from xla_adapters.insight.run_record import RunRecord, RunStats, about
from xla_adapters.insight.times import CALLBACKS, OTHER
from xla_adapters.loop.steps import StallWatch
from xla_adapters.runtime import check_mode
from xla_adapters.runtime.rng import use_random_algorithm
from xla_adapters.sharding import Sharder, launched_ranks

_Event = Callable[[TrainerControl], None]


def surround(
    handler: CallbackHandler, before: Mapping[str, _Event], after: Mapping[str, _Event], record: RunRecord
) -> None:
    """Calls functions before and after the callbacks of a handler at some events.

    Those before see no result that a callback has changed, and callbacks see the step executed. Those after see the
    decisions that the callbacks have put into `control`.

    Args:
        handler: of a trainer.
        before, after: the functions by event, called with `control`.
        record: told while callbacks run.
    """
    call_event: Callable[..., TrainerControl] = handler.call_event
    clock, transfers = record.clock, record.transfers

    def surrounded(event: str, args: Any, state: Any, control: TrainerControl, **kwargs: Any) -> TrainerControl:
        if event in before:
            before[event](control)
        with clock.during(CALLBACKS):
            if clock.is_running and transfers.looks:
                control = transfers.looked_through(call_event, event, args, state, control, **kwargs)
            else:
                control = call_event(event, args, state, control, **kwargs)
        if event in after:
            after[event](control)
        return control

    handler.call_event = surrounded  # type: ignore[method-assign]


class XLAStatsCallback(TrainerCallback):
    """Prints at the end of a training how many compiles it had, how many executions per step, and its throughput.

    Attributes:
        stats: the numbers. The trainer that has the callback sets them.
    """

    def __init__(self) -> None:
        self.stats = RunStats()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.stats.stop()
        if state.is_world_process_zero:
            print(f"\nwhat the training cost\n{self.stats.summary()}", file=sys.stderr)


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

    steps: TrainerSteps
    session: Session
    training: TrainingSteps
    evaluation: Evaluation

    def __init__(self, trainer: transformers.Trainer, base: Any, options: TrainerOptions) -> None:
        self.options = options
        self._trainer = trainer
        self._base = base
        get_runtime().device.use_compile_cache(options.config.cache_dir)
        ranks = launched_ranks(options.sharding, options.config, options.shapes)
        # Sharding selects SPMD, which must be done before the runtime starts.
        shards = ranks is None and options.sharding is not None
        sharder = Sharder(options.sharding, options.config) if shards else None  # type: ignore[arg-type]
        get_runtime().device.initialize()
        check_mode(options.config.xla_mode)
        check_runtime(sharder is not None)
        # Before the device draws a random number.
        self._random_algorithm = use_random_algorithm(options.config)
        self.run_stats = RunStats()
        self.record = RunRecord(self.run_stats, enabled=options.xla_report)
        self.sharding = ModelSharding(trainer, options.sharding, sharder, ranks)
        if ranks is not None and options.checkpoint.stall_deadline is not None:
            ranks.ranks.deadline = options.checkpoint.stall_deadline
        self.moves = ParameterMoves()
        self.inputs = Inputs(trainer, base, sharder)
        self.shapes = TrainerShapes(trainer, options.shapes)
        self.watch = StallWatch(options.checkpoint.stall_deadline)
        self.stores = CheckpointStores(trainer, options, self.sharding.devices, self._random_algorithm)
        self.checkpoints = SafeCheckpoints(trainer, base, self.stores, options.checkpoint)
        self.resumed = ResumedCounts(trainer, base)
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
            processes=1 if self.sharding.ranks is not None else trainer.args.world_size,
            in_parts=self.sharding.saves_shards,
            limit=trainer.args.save_total_limit,
        )
        # After all that may refuse the options: a trainer that cannot be made leaves the process as it is.
        initialize(eager=options.config.eager_by_default)
        save_pretrained_from_device()
        hold_jit_checkpoint(trainer.callback_handler.callbacks)
        if self.sharding.ranks is not None:
            # Otherwise accelerate would wrap the model in torch's DistributedDataParallel.
            accelerator: Any = trainer.accelerator
            accelerator.prepare_model = functools.partial(accelerator.prepare_model, evaluation_mode=True)
        self.steps = make_steps(options.config, trainer.args)
        self.session = Session(trainer, self.steps, self.sharding, self.moves)
        self.training = TrainingSteps(
            trainer, base, self.steps, self.inputs, self.record, self.shapes, self.sharding.ranks
        )
        self.evaluation = Evaluation(trainer, base, self.steps, self.inputs, self.session, self.shapes)
        self.checkpoints.steps = self.steps
        surround(
            trainer.callback_handler,
            before={
                "on_train_begin": self._training_begins,
                "on_optimizer_step": self._optimizer_stepped,
                "on_substep_end": self._substep_ended,
            },
            after={"on_step_end": self._step_is_done, "on_substep_end": self._accumulation_may_stop},
            record=self.record,
        )

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
            stack.enter_context(
                self.record.running(
                    about(trainer.model, type(trainer).__name__),
                    programs=lambda: self.steps.programs,
                    training=lambda: [self.steps.train],
                    folder=self._report_folder(),
                    plan=self.sharding.summary,
                    shapes=lambda: self.shapes.announced,
                )
            )
            stack.enter_context(self.session.running())
            stack.enter_context(
                no_search_for_gradients(lambda: trainer.model, lambda: self.steps.train.left_no_gradients)
            )
            self.run_stats.start()
            stack.callback(self.run_stats.stop)
            yield stack.enter_context(self.checkpoints.training(resume_from))
            # What the last steps have left to look at: checks of a model, say.
            get_runtime().transfers.deliver_piggy_backed(at_the_end=True)
            if self.sharding.ranks is not None:
                self.sharding.ranks.ranks.ends(f"train(), after {trainer.state.global_step} steps")

    def training_loop(self) -> AbstractContextManager[object]:
        """Around the training loop: an error discards the open step, and ends the watch over it."""
        stack = ExitStack()
        stack.enter_context(self.training.loop())
        stack.push(self.watch.receive)
        return stack

    def saving(self) -> AbstractContextManager[None]:
        """Around the save of a checkpoint."""
        step = self._trainer.state.global_step
        return self.record.saving(step, str(Path(str(self._trainer.args.output_dir)) / f"checkpoint-{step}"))

    def _report_folder(self) -> Path | None:
        folder = self._trainer.args.output_dir
        if not self._trainer.is_world_process_zero() or folder is None or "://" in str(folder):
            return None
        return Path(folder)

    def add_to(self, logs: dict[str, Any]) -> None:
        """Adds to what the trainer is about to log of its training: `xla/goodput` and others.

        Only where something is reported to: without, they would be in the terminal and in `log_history` alone, where
        runs are compared.
        """
        if "loss" in logs and self._trainer.args.report_to:
            logs.update({f"xla/{name}": float(f"{value:.4g}") for name, value in self.record.scalars().items()})

    # ---- events of the training loop ---------------------------------------------------------------

    def _training_begins(self, control: TrainerControl) -> None:
        """The model and the optimizer exist; the weights may come from a checkpoint."""
        # `model_init` has made another one since the session began.
        self.session.prepare_model()
        self.moves.note(model_of(self._trainer))
        self.record.model_is_made(model_of(self._trainer))
        self.sharding.training_begins()
        if self.checkpoints.resumed_from is not None:
            restore_rest(self._trainer, self.checkpoints.resumed_from)
        self.record.setup_ended()

    def _optimizer_stepped(self, control: TrainerControl) -> None:
        """The optimizer has stepped: the step ends here, before other callbacks see the model."""
        self.training.end_update()
        loader = self._trainer.callback_handler.train_dataloader
        if isinstance(loader, DeviceLoader):
            loader.position.trained = loader.position.taken
        self.record.clock.switch(OTHER)
        self.watch.stop()

    def _substep_ended(self, control: TrainerControl) -> None:
        """A micro batch without an update has ended."""
        self.training.end_substep()
        self.record.clock.switch(OTHER)

    def _step_is_done(self, control: TrainerControl) -> None:
        """An optimizer step and all its callbacks are done: a checkpoint may be due."""
        self.record.step_ended()
        self.checkpoints.step_is_done(control)

    def _accumulation_may_stop(self, control: TrainerControl) -> None:
        """If the loop stops between two micro batches of an update, the open step is discarded."""
        if control.should_epoch_stop or control.should_training_stop:
            self.steps.abort()
