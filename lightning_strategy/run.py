"""`Run`: one fit, validation, test or prediction of a Trainer on XLA, from its setup to its teardown."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn

from lightning_strategy.averaged_weights import averaging_in_one_graph
from lightning_strategy.data_position import DataPosition
from lightning_strategy.deferred_metrics import DeferredMetrics
from lightning_strategy.dynamo import compiled_children
from lightning_strategy.grads import GRADIENTS, accumulated, nobody_sees_grads
from lightning_strategy.logged_metrics import MetricReader, reading_logged_metrics
from lightning_strategy.metric_states import MetricStates
from lightning_strategy.refusals import check_nesting, check_trainer
from lightning_strategy.replay import ReplayRules, keep_outputs, replaying_loops
from lightning_strategy.scheduled_saves import ScheduledSaves
from lightning_strategy.sharding import ModuleSharding
from lightning_strategy.step_driver import StepDriver
from lightning_strategy.step_edges import StepEdges, standing_first, standing_last
from lightning_strategy.torchmetrics_in_steps import metrics_without_reads
from xla_adapters import StepProgram, XLAConfig, get_backend
from xla_adapters.checkpoint import CheckpointConfig, Watchdog
from xla_adapters.errors import BreakKind
from xla_adapters.host_random import HostRandom
from xla_adapters.modes import eager
from xla_adapters.program import ReplayRequest
from xla_adapters.random_algorithm import resume_random_algorithm
from xla_adapters.rollback import release_retired
from xla_adapters.step_scope import current_scope

_active: list[Run] = []


class Run:
    """Holds what lasts as long as the run: the eager mode, the patches, and the steps.

    Args:
        trainer: runs the loops.
        config: the options.
        sharding: of the strategy, if it shards.
        checkpoint: when to save, and what takes too long.
    """

    def __init__(
        self,
        trainer: Trainer,
        config: XLAConfig,
        sharding: ModuleSharding | None = None,
        checkpoint: CheckpointConfig | None = None,
    ) -> None:
        self.config = config
        self._checkpoint = checkpoint if checkpoint is not None else CheckpointConfig()
        self._watching = ExitStack()
        self._data = DataPosition(trainer)
        self._sharding = sharding
        self._stretch: Hashable = None
        self._trainer = trainer
        self._backend = get_backend()
        self._lasting = ExitStack()
        self._states: MetricStates | None = None
        self._rules: ReplayRules | None = None
        self._frees_grads = False
        self._goes_on = False
        self._put_back: Callable[[], None] | None = None
        self._deferred = DeferredMetrics()
        self.steps = StepDriver(
            config,
            base_seed(),
            before_step=self._before_step,
            after_step=self._deferred.after_step,
            after_discard=self._after_discard,
        )
        self._reader = MetricReader(lambda: self.steps.is_open)

    @property
    def _module(self) -> LightningModule:
        module = self._trainer.lightning_module
        assert module is not None
        return module

    # ---- beginning and end ---------------------------------------------------------------------

    def begin(self) -> None:
        """Switches to the run's mode.

        Raises:
            ConfigError: another run in this process is under way with other settings.
        """
        check_nesting([run.config for run in _active], self.config)
        _active.append(self)
        self._lasting.callback(_active.remove, self)
        self._lasting.callback(release_retired)
        self._lasting.enter_context(eager(self.config.eager_by_default))
        self._lasting.enter_context(reading_logged_metrics(self._reader))
        self._lasting.enter_context(metrics_without_reads())
        self._lasting.enter_context(averaging_in_one_graph(self.config))
        saves = ScheduledSaves(self._checkpoint)
        self._lasting.callback(saves.close)
        self._lasting.enter_context(standing_last(self._trainer, saves))
        self._lasting.enter_context(self._data.followed())
        self._lasting.enter_context(self._watched_fit())
        self._lasting.enter_context(standing_first(self._trainer, StepEdges(self.steps, self._leaves_open)))

    def check(self) -> None:
        """Raises on what the module and the Trainer want and a compiled step cannot do."""
        check_trainer(self._trainer, self._module, self.config)

    def model_is_ready(self, random_state: dict[str, Any] | None) -> None:
        """The model is on the device and the optimizers are there.

        Args:
            random_state: of the checkpoint the run resumes from.
        """
        self._states = MetricStates(self._trainer, self._module)
        if self.steps.may_replay:
            self._rules = ReplayRules(
                self._trainer, self._module, self._deferred.waiting, proves=self.config.step_replay is not True
            )
            self._lasting.enter_context(replaying_loops(self._trainer, self.steps))
        self._lasting.enter_context(self._deferred.of(self._module))
        if self._sharding is not None:
            self._lasting.enter_context(self._sharding.holding(self._module))
        self._frees_grads = self._decide_free_grads()
        if self.config.xla_mode == "eager+dynamo":
            self._lasting.enter_context(compiled_children(self._module, self._backend.dynamo_backend))
        if random_state is not None and self._trainer.state.fn == TrainerFn.FITTING:
            self.steps.seed = int(random_state["seed"])
            self._backend.set_seed(int(random_state["device"]))
            if "algorithm" in random_state:
                resume_random_algorithm(random_state["algorithm"])
            if "host" in random_state:
                host = HostRandom.of_saved(random_state["host"])
                epoch, generators = random_state.get("epoch"), random_state.get("generators", ())
                self._data.resume(random_state.get("data"), host, epoch, generators)

    def resumes_gradients(self, put_back: Callable[[], None]) -> None:
        """Gradients are put back before the first batch: the Trainer drops what there is before it begins."""
        self._put_back = put_back

    def _decide_free_grads(self) -> bool:
        if not self.config.compiles_step or not self._module.automatic_optimization:
            return False
        if self.config.free_grads == "auto":
            return nobody_sees_grads(self._trainer, self._module)
        return bool(self.config.free_grads)

    def state(self, *, with_gradients: bool) -> dict[str, Any]:
        """What a checkpoint must hold to be gone on from as if it had not been taken: random numbers, the data's place.

        Args:
            with_gradients: between the micro batches of an update its gradients, too.
        """
        state = {
            "seed": self.steps.seed,
            "device": self._backend.seed(),
            "algorithm": self._backend.random_algorithm(),
            "host": HostRandom.now().to_save(),
            "epoch": self._data.next_epoch,
            "generators": self._data.generators(),
        }
        position = self._data.position()
        if position is not None:
            state["data"] = position
        gradients = accumulated(self._trainer, self._module) if with_gradients else {}
        return {**state, GRADIENTS: gradients} if gradients else state

    def before_teardown(self) -> None:
        """Nothing of a step is left; what the progress bar showed last becomes numbers."""
        self._watching.close()
        self.steps.abort()
        connector = self._trainer._logger_connector
        connector._progress_bar_metrics = self._reader.scalars(connector._progress_bar_metrics)

    def end(self) -> None:
        """Undoes what `begin` did."""
        self._lasting.close()

    # ---- steps ---------------------------------------------------------------------------------

    def before_upload(self) -> None:
        """A batch is about to be moved to the device."""
        if self._trainer.training:
            self._data.before_batch()
            put_back, self._put_back = self._put_back, None
            if put_back is not None:
                put_back()
        self._watch_step()
        loop = self._trainer.fit_loop
        self.steps.before_upload(loop.total_batch_idx + 1 if self._trainer.training else -1)

    def _watch_step(self) -> None:
        """A step and the loading of the next batch are watched together: there is no hook between them."""
        self._watching.close()
        if self._trainer.training and not self.steps.is_open:
            watchdog = Watchdog(self._checkpoint.stall_deadline)
            where = f"step {self._trainer.global_step + 1}, or the loading of the batch after it,"
            self._watching.enter_context(watchdog.watch(where))

    @contextmanager
    def _watched_fit(self) -> Iterator[None]:
        """What ends the loop is handed to the watch that is open, which knows whether it was its own doing."""
        loop, run = self._trainer.fit_loop, self._trainer.fit_loop.run

        def watched() -> None:
            with ExitStack() as stack:
                stack.push(self._watching.__exit__)
                run()

        vars(loop)["run"] = watched
        try:
            yield
        finally:
            del vars(loop)["run"]

    def after_save(self) -> None:
        """A checkpoint is written, or being written: the loading of the next batch is watched again."""
        self._watch_step()

    def end_watch(self) -> None:
        """What is done now is not a step's."""
        self._watching.close()

    def begin_batch(self, batch: Any, batch_idx: int) -> None:
        """A training batch is about to be computed.

        Raises:
            ConfigError: it is the first, and cannot be split over the devices.
        """
        self._goes_on = False
        loop = self._trainer.fit_loop
        if self._sharding is not None:
            self._sharding.check_first_batch(batch)
            self._enter_stretch(("train", self._trainer.current_epoch))
        phase, facts = "manual optimization", {}
        if self._module.automatic_optimization:
            # The loop drops the gradients in the first one.
            first = batch_idx % self._trainer.accumulate_grad_batches == 0
            micro_batch = loop._should_accumulate() and self.config.accumulation == "per_micro_batch"
            phase = ("accumulate, first" if first else "accumulate") if micro_batch else "update"
            facts = {"gradients": "absent" if first else "present"}
        self.steps.begin_batch(
            batch,
            index=loop.total_batch_idx,
            phase=phase,
            facts=facts,
            where=self._where(batch_idx),
            replay=self._training_replay(batch, (*facts.values(), self._frees_grads)),
        )

    def _training_replay(self, batch: Any, known: tuple[Hashable, ...]) -> ReplayRequest | None:
        if self._rules is None or self.steps.is_open:
            return None
        return self._allowed(self.steps.train, self._rules.training(batch, known))

    def _allowed(self, program: StepProgram, replay: ReplayRequest | str) -> ReplayRequest | None:
        if isinstance(replay, ReplayRequest):
            return replay
        program.refuse_replay(replay)
        return None

    @contextmanager
    def update(self, closure: Any) -> Iterator[None]:
        """Around clipping and update (and, but under dynamo, what the closure computes before).

        Args:
            closure: what the optimizer was given.
        """
        where = self._where(self._trainer.fit_loop.batch_idx)
        if self.config.xla_mode == "eager+dynamo":
            with self.steps.dynamo_update(where):
                yield
            return
        is_own_step = self.steps.begin_update(where)
        with self.steps.discarding():
            yield
            if self._frees_grads:
                self._module.zero_grad(set_to_none=True)
            if self._module.automatic_optimization:
                keep_outputs(self.steps, closure)
            if is_own_step or self._module.automatic_optimization:
                self.steps.end_batch()

    def _leaves_open(self) -> bool:
        """Whether the batch that ends is one of several in an unrolled accumulation, and not the last."""
        unrolled = self.config.accumulation == "unrolled" and self.steps.train.is_open
        self._goes_on = unrolled and self._module.automatic_optimization and self._trainer.fit_loop._should_accumulate()
        return self._goes_on

    @contextmanager
    def evaluation_step(self, name: str, args: tuple[Any, ...]) -> Iterator[StepProgram]:
        """Around one batch of evaluation or prediction."""
        self.end_watch()
        self._enter_stretch(name)
        takes_batch = len(args) > 1 and isinstance(args[1], int)
        where = f"batch {args[1]}" if takes_batch else ""
        replay = None
        if takes_batch and self._rules is not None and self.config.compile_eval:
            program = self.steps.evaluation[name]
            if not program.is_open:
                replay = self._allowed(program, self._rules.evaluation(name, args[0], args[2:]))
        batch, watchdog = args[0] if takes_batch else None, Watchdog(self._checkpoint.stall_deadline)
        with watchdog.watch(name), self.steps.evaluation_step(name, batch, where, replay) as program:
            yield program

    def _enter_stretch(self, stretch: Hashable) -> None:
        """Between training and evaluation callbacks may have put other weights in (averages): they are cut too."""
        if self._sharding is not None and stretch != self._stretch and not self.steps.is_open:
            self._sharding.cut_again(self._module)
            self._stretch = stretch

    def _where(self, batch_idx: int) -> str:
        return f"batch {batch_idx} of epoch {self._trainer.current_epoch}"

    def _before_step(self) -> None:
        self._reader.forget()
        if self._states is not None:
            self._states.keep()

    def _after_discard(self) -> None:
        self._deferred.discard()
        if self._states is not None:
            self._states.put_back()

    # ---- checkpoints ---------------------------------------------------------------------------

    def resumes_from(self, path: str) -> None:
        """The checkpoint that is loaded instead of the one that was found first."""
        self._trainer._checkpoint_connector._ckpt_path = path

    def before_save(self, path: Any) -> None:
        """A checkpoint is about to be written.

        Raises:
            CheckpointSaveError: inside a step.
        """
        self.end_watch()
        if self._goes_on:
            # Between the micro batches of one unrolled step: what there is of it is executed.
            self.steps.end_batch()
        scope = current_scope()
        if scope is not None:
            scope.meet_break(BreakKind.CHECKPOINT_SAVE, f"the checkpoint {os.fspath(path)}")


def base_seed() -> int:
    """The seed of `seed_everything`, or torch's."""
    given = os.environ.get("PL_GLOBAL_SEED")
    return int(given) if given is not None else torch.initial_seed()
