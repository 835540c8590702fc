"""`Run`: one fit, validation, test or prediction of a Trainer on XLA, from its setup to its teardown."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.call import _call_and_handle_interrupt
from lightning.pytorch.trainer.states import TrainerFn

from lightning_strategy.checkpoints import SavingCallback
from lightning_strategy.connector import flops_of_devices
from lightning_strategy.data_position import DataPosition, exact_state, restore_exact_state
from lightning_strategy.metrics import RunMetrics
from lightning_strategy.refusals import check_nesting, check_trainer
from lightning_strategy.replay import ReplayRules
from lightning_strategy.report import FitReport
from lightning_strategy.shapes import LoaderShapes
from lightning_strategy.sharding import ModuleSharding, as_one_of
from lightning_strategy.steps import (
    GRADIENTS,
    LoopSteps,
    accumulated,
    averaging_in_one_graph,
    backward_in_step,
    callbacks_around,
    check_accumulation,
    compiled_children,
    replaying_loops,
)
from xla_adapters import XLAConfig, get_runtime
from xla_adapters.checkpoint import CheckpointConfig
from xla_adapters.errors import BreakKind
from xla_adapters.loop.steps import StallWatch, StepDriver, around_run
from xla_adapters.sharding import DataParallel
from xla_adapters.tracing.library_reads import allowing_reads, reads_of_packages
from xla_adapters.tracing.step_scope import current_scope
from xla_adapters.utils.patching import replaced
from xla_adapters.utils.torch_modes import TorchModes, as_if_compiling, inference_mode_as_no_grad

_CALL = _call_and_handle_interrupt.__code__


class TrainerCall:
    """The innermost call of a Trainer's methods that is under way in this thread.

    Lightning's handling of an exception may fail itself, as near the recursion limit. Then it calls no `teardown`, and
    only the stack tells that the call has ended.

    Args:
        trainer: whose method it is.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._thread = threading.current_thread()
        self._frame = next((frame for frame in _calls() if frame.f_locals["trainer"] is trainer), None)

    @property
    def has_ended(self) -> bool:
        """Whether the method was left. False for the call of another thread, and for one that was not found."""
        is_here = self._thread is threading.current_thread()
        return is_here and self._frame is not None and not any(frame is self._frame for frame in _calls())


def _calls() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _CALL:
            yield frame
        frame = frame.f_back


_active: list[Run] = []
_HINT = " (in on_train_batch_end, or in an on_..._epoch_end hook)"
_EVALUATION_HINT = " (in on_..._batch_end or on_..._epoch_end; compile_eval=False runs evaluation steps eagerly)"


class Run:
    """Owns everything that lasts from setup to teardown: the eager mode, the patches, and the objects below.

    Args:
        trainer: runs the loops.
        config: the options.
        sharding: of the strategy, if it shards.
        checkpoint: when to save, and what takes too long.
        report: notes where the time goes; by default none is noted.
        shapes: gives batches few shapes; by default they stay as they are.
        ranks: trains together with other processes.

    Attributes:
        config: the options.
        steps: opens and closes the steps.
        batches: which batch belongs to which step.
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
        shapes: LoaderShapes | None = None,
        ranks: DataParallel | None = None,
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
            ("validation_step", "test_step", "predict_step"),
            hint=_HINT,
            evaluation_hint=_EVALUATION_HINT,
            before_step=self.metrics.before_step,
            after_step=self._after_step,
            after_discard=self.metrics.after_discard,
        )
        self.stalls = StallWatch(self._checkpoint.stall_deadline)
        self._ranks = ranks
        if ranks is not None and self._checkpoint.stall_deadline is not None:
            ranks.ranks.deadline = self._checkpoint.stall_deadline
        self._shapes = shapes if shapes is not None else LoaderShapes(None, base_seed)
        self.batches = LoopSteps(trainer, self.steps, sharding, self.stalls, self._shapes, ranks)

    @property
    def _module(self) -> LightningModule:
        module = self._trainer.lightning_module
        assert module is not None
        return module

    def _after_step(self) -> None:
        self.metrics.deferred.after_step()
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
        lasting.enter_context(as_if_compiling(torch.compiler._is_compiling_flag))
        lasting.callback(_active.remove, self)
        lasting.enter_context(around_run(self.config))
        lasting.enter_context(inference_mode_as_no_grad())
        lasting.enter_context(allowing_reads(reads_of_packages((), self._module)))
        lasting.enter_context(flops_of_devices())
        lasting.enter_context(self.metrics.patched())
        lasting.enter_context(averaging_in_one_graph(self.config))
        lasting.enter_context(backward_in_step(self._trainer, self.steps, self._ranks))
        if self._ranks is not None:
            saves_at_signals = self._checkpoint.save_on == "preemption"
            lasting.enter_context(as_one_of(self._ranks.ranks, self._trainer, saves_at_signals=saves_at_signals))
        saves = SavingCallback(self._checkpoint)
        lasting.callback(saves.close)
        lasting.enter_context(self.data.followed())
        lasting.enter_context(_errors_passing(self.stalls, self._trainer))
        # Before the callbacks of ours, whose work is not that of the user's callbacks.
        plan = str if self._sharding is None else self._sharding.summary
        lasting.enter_context(self._report.running(self._trainer, self.steps, plan, lambda: self._shapes.announced))
        lasting.enter_context(callbacks_around(self._trainer, first=self.batches, last=saves))

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

        Raises:
            CheckpointError: its gradients are a part of an update, which has another size now.
        """
        lasting, module = self._lasting, self._module
        self.metrics.take_snapshots_of(module)
        rules = None
        if self.steps.may_replay:
            proves = self.config.step_replay is not True
            rules = ReplayRules(self._trainer, module, self.metrics.deferred.waiting, proves=proves)
            lasting.enter_context(replaying_loops(self._trainer, self.steps))
        lasting.enter_context(self.metrics.deferred.of(module))
        if self._sharding is not None:
            lasting.enter_context(self._sharding.holding(module))
        self.batches.model_is_ready(rules)
        if self.config.xla_mode == "eager+dynamo":
            lasting.enter_context(compiled_children(module, get_runtime().dynamo_backend))
        if saved is not None and self._trainer.state.fn == TrainerFn.FITTING:
            check_accumulation(self._trainer, saved)
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
        self._watch_training()
        self.steps.before_upload(self._trainer.fit_loop.total_batch_idx + 1 if training else -1)

    def _watch_training(self) -> None:
        """Watches the training step that begins and the loading of the batch after it: no hook is between them."""
        self.stalls.stop()
        if self._trainer.training and not self.steps.is_open:
            self.stalls.begin(f"step {self._trainer.global_step + 1}, or the loading of the batch after it,")

    def watch_loading(self) -> None:
        """Watches the loading of the next batch of a training, after something that is no part of a step."""
        trainer = self._trainer
        if trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking and not self.steps.is_open:
            self.stalls.begin(f"the loading of the batch of step {trainer.global_step + 1}")

    # ---- checkpoints ---------------------------------------------------------------------------

    def exact_state(self, *, with_gradients: bool) -> dict[str, Any]:
        """What a checkpoint must hold for a resumed run to compute the same as this one.

        Args:
            with_gradients: between the micro batches of an update its gradients, too.
        """
        state = exact_state(self.steps.seed, self.data)
        gradients = accumulated(self._trainer, self._module, self._ranks) if with_gradients else {}
        if not gradients:
            return state
        return {**state, GRADIENTS: gradients, "accumulates": self._trainer.accumulate_grad_batches}

    def before_save(self, path: Any) -> None:
        """A checkpoint is about to be written.

        Raises:
            CheckpointSaveError: inside a step.
        """
        self.stalls.stop()
        self.batches.end_accumulation()
        scope = current_scope()
        if scope is not None:
            scope.meet_break(BreakKind.CHECKPOINT_SAVE, f"the checkpoint {os.fspath(path)}")

    def after_save(self, path: Any) -> None:
        """A checkpoint is written, or being written: the loading of the next batch is watched again."""
        self.steps.train.note_checkpoint(os.fspath(path))
        self.watch_loading()

    def resumes_from(self, path: str) -> None:
        """Tells the Trainer which checkpoint was loaded instead of the one that it found."""
        self._trainer._checkpoint_connector._ckpt_path = path

    def resumes_gradients(self, load: Callable[[], None]) -> None:
        """Has saved gradients loaded before the first batch: the Trainer drops all gradients before it begins.

        Args:
            load: loads them.
        """
        self._load_gradients = load


@contextmanager
def _errors_passing(stalls: StallWatch, trainer: Trainer) -> Iterator[None]:
    """Until the exit, an exception that ends the fit loop passes through the open watchdog.

    The watchdog interrupts the main thread; it replaces that interrupt by its own error.
    """
    loop = trainer.fit_loop
    kind: Any = type(loop)
    stock = kind.run

    def run(running: Any) -> None:
        with ExitStack() as stack:
            if running is loop:
                stack.push(stalls.receive)
            stock(running)

    with replaced(kind, "run", run):
        yield


def base_seed() -> int:
    """The seed of `seed_everything`, or torch's."""
    given = os.environ.get("PL_GLOBAL_SEED")
    return int(given) if given is not None else torch.initial_seed()
