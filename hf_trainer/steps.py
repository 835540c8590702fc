"""The training and evaluation steps of a trainer, each one compiled graph."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
import transformers
from torch.optim.lr_scheduler import ReduceLROnPlateau
from transformers import TrainerCallback
from transformers.optimization import GreedyLR
from transformers.trainer_pt_utils import find_batch_size

from hf_trainer.data import Inputs, count_tokens, gathers_on_device
from hf_trainer.generation import GENERATION, TrainerSteps, compiled_generation
from hf_trainer.libraries import generates_batches, generating, generating_apart, libraries_of, prepared, reads_allowed
from hf_trainer.model import ModelSharding, ParameterMoves, model_of
from hf_trainer.patches import (
    as_if_compiling,
    correct_process_index,
    losses_not_filtered,
    losses_of_ranks,
    trainer_patches,
)
from hf_trainer.replay import (
    ReplayedLoss,
    add_metrics,
    appends_metrics,
    call_spec,
    metrics_added,
    metrics_reason,
    overridden,
    reason_around,
    reason_within,
    step_code,
)
from hf_trainer.shapes import TrainerShapes
from xla_adapters import XLAConfig, get_runtime
from xla_adapters.data.batches import token_count
from xla_adapters.insight.run_record import RunRecord
from xla_adapters.insight.times import STEP
from xla_adapters.loop.gradient_reads import schedule_sees_gradients
from xla_adapters.loop.replay import copies
from xla_adapters.loop.steps import StepDriver, around_run, check_loss
from xla_adapters.replay.call_spec import CallSpec
from xla_adapters.replay.safety import is_trusted
from xla_adapters.runtime.transfers import to_host_in_one_transfer, uploading
from xla_adapters.sharding import DataParallel
from xla_adapters.utils.patching import replaced
from xla_adapters.utils.torch_modes import modules_compiled, use_no_grad_for_inference_mode

# The name of the evaluation step.
EVALUATION = "eval_step"
_HINT = " (a TrainerCallback may in on_step_end, on_log and on_evaluate)"
_EVAL_HINT = f"{_HINT[:-1]}; compile_eval=False evaluates operation by operation, where everything may be read)"


def make_steps(config: XLAConfig, args: transformers.TrainingArguments) -> TrainerSteps:
    """The steps of a trainer: of training, evaluation and generation."""
    folder = None if args.output_dir is None else str(args.output_dir)
    return TrainerSteps(
        config.of_run(folder), args.seed, (EVALUATION, GENERATION), hint=_HINT, evaluation_hint=_EVAL_HINT
    )


@contextmanager
def checked_loss(trainer: transformers.Trainer) -> Iterator[None]:
    """Inside the context `trainer.compute_loss` raises if its loss is not a tensor with one element.

    transformers divides the loss and differentiates it, whose errors name neither the function nor what it returned.

    Args:
        trainer: with all overrides of the user's class.
    """
    method, source = trainer.compute_loss, _source(trainer)

    @functools.wraps(method)
    def compute_loss(*args: Any, **kwargs: Any) -> Any:
        loss = method(*args, **kwargs)
        if not (args[2] if len(args) > 2 else kwargs.get("return_outputs")):
            check_loss(loss, source)
        return loss

    with replaced(trainer, "compute_loss", compute_loss):
        yield


def _source(trainer: transformers.Trainer) -> Callable[..., Any]:
    """The function that the loss is from."""
    if overridden(trainer, ("compute_loss",)) is not None:
        return trainer.compute_loss
    return trainer.compute_loss_func or model_of(trainer).forward


class Session:
    """What must hold while a trainer trains, evaluates, predicts or generates: patches, eager mode, shardings.

    Args:
        trainer: the trainer.
        steps: discards steps that are still open at the end.
        sharding: of the trainer's model.
        moves: of the trainer's model.
    """

    def __init__(
        self, trainer: transformers.Trainer, steps: StepDriver, sharding: ModelSharding, moves: ParameterMoves
    ) -> None:
        self._trainer = trainer
        self._steps = steps
        self._moves = moves
        self._sharding = sharding
        self._is_running = False
        self._prepared: torch.nn.Module | None = None
        self._compiled = ExitStack()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Sets everything up, and undoes it at the exit. A nested call (evaluation in a training) does nothing."""
        if self._is_running:
            yield
            return
        with ExitStack() as stack:
            stack.callback(setattr, self, "_is_running", False)
            self._is_running = True
            correct_process_index(self._trainer.args)
            stack.enter_context(trainer_patches())
            stack.enter_context(reads_allowed(self._trainer))
            stack.enter_context(around_run(self._steps.config))
            self._moves.bring_back(self._trainer)
            stack.enter_context(self._sharding.applied())
            stack.callback(setattr, self, "_prepared", None)
            stack.enter_context(self._compiled)
            self.prepare_model()
            stack.callback(self._steps.abort)
            yield

    def prepare_model(self) -> None:
        """Prepares the model, if there is one.

        With `model_init` there may be none when a training begins: a search for hyperparameters drops that of the trial
        before. `train` then makes it, and any other time replaces it.
        """
        model: Any = self._trainer.model
        if model is None or model is self._prepared:
            return
        self._prepared = model
        use_no_grad_for_inference_mode(model)
        if self._steps.config.xla_mode == "eager+dynamo":
            self._compiled.close()
            self._compiled.enter_context(modules_compiled([model], get_runtime().dynamo_backend))


class TrainingSteps:
    """Runs the methods that the training loop calls between two batches inside the steps of a `StepDriver`.

    HF's loop calls `training_step`, adds the loss to its sum (`Trainer._tr_loss`), clips gradients, steps the optimizer
    and then calls `on_optimizer_step` of the callbacks. The step is opened in `training_step` and closed in that
    callback. In a replayed step the methods of the base class are not called: the executable does their work.

    Args:
        trainer: the trainer.
        base: the methods that the mixin overrides.
        steps: opens and closes the steps.
        inputs: moves batches to the device.
        record: counts steps, samples and tokens, and is told that results are waited for.
        shapes: gives batches few shapes.
        ranks: trains together with other processes.
    """

    def __init__(
        self,
        trainer: transformers.Trainer,
        base: Any,
        steps: TrainerSteps,
        inputs: Inputs,
        record: RunRecord,
        shapes: TrainerShapes,
        ranks: DataParallel | None,
    ) -> None:
        self._ranks = ranks
        self._trainer = trainer
        self._base = base
        self._steps = steps
        self._config = steps.config
        self._inputs = inputs
        self._record = record
        self._shapes = shapes
        self._code = step_code(trainer, steps.config)
        self._micro_step = 0
        # Batches whose tokens are counted when the step has ended.
        self._uncounted: list[Mapping[str, Any]] = []
        # The schedule of the learning rate, and whether it may look at gradients.
        self._seeing: tuple[Any, bool] = None, False
        self._has_explained_filter = False
        self._filters = False

    @contextmanager
    def loop(self) -> Iterator[None]:
        """Around the training loop: an error discards the open step, and no loss is left out of the sum."""
        self._filters = self._trainer.args.logging_nan_inf_filter
        with losses_not_filtered(self._trainer), self._steps.discarding():
            yield

    # ---- what the loop calls ---------------------------------------------------------------------

    def new_update(self) -> None:
        """A new optimizer step begins: the count of micro batches restarts."""
        self._micro_step = 0
        if self._steps.is_open:
            # An epoch of unknown length ended in the middle of an unrolled accumulation.
            self._steps.end()

    def step(
        self, model: torch.nn.Module, inputs: dict[str, Any], num_items_in_batch: torch.Tensor | int | None
    ) -> torch.Tensor:
        """As `Trainer.training_step`. Opens the step, which `end_update` closes."""
        trainer, steps = self._trainer, self._steps
        if trainer._tr_loss.ndim == 0:
            # The scalar that the loop begins with is never donated.
            trainer._tr_loss = self._zero()
        self._record.stats.count_batch(samples=find_batch_size(inputs) or 0, tokens=token_count(inputs))
        spec = None
        generated = generates_batches(trainer)
        if generated:
            # As the method of the base class does before it prepares the batch. An evaluation has changed the mode.
            model.train()
            with generating(trainer, model, steps.generation, self._inputs):
                inputs = trainer._prepare_inputs(inputs)
            inputs, length = self._inputs.uploaded(inputs), ""
        else:
            inputs, length = self._shapes.of_training(inputs)
        if self._may_replay():
            # Before the step begins, because a replay does not call the base class's method.
            inputs = inputs if generated else self._inputs.before_step(inputs)
            num_items_in_batch = self._inputs.item_count_on_device(num_items_in_batch)
            spec = self._call_spec(model, inputs, num_items_in_batch)
        updates = trainer.accelerator.gradient_state.sync_gradients or self._config.accumulation == "unrolled"
        steps.begin(
            inputs,
            step=trainer.state.global_step,
            micro_step=self._micro_step,
            phase=("update" if updates else "accumulate") + length,
            facts={"gradients": "absent" if self._micro_step == 0 else "present"},
            replay=spec,
        )
        self._micro_step += 1
        if steps.train.is_replaying:
            if appends_metrics(trainer):
                add_metrics(trainer, "train", steps.train.promise("metrics"))
            replayed: Any = ReplayedLoss(trainer._tr_loss.device)
            if not generated:
                return replayed  # type: ignore[no-any-return]
            # What TRL does around the step.
            with replaced(transformers.Trainer, "training_step", lambda *_: replayed):
                return self._base.training_step(model, inputs, num_items_in_batch)  # type: ignore[no-any-return]
        with ExitStack() as stack:
            stack.enter_context(self._around_training_step())
            if generated:
                stack.enter_context(prepared(trainer))
            added = (
                stack.enter_context(metrics_added(trainer, "train"))
                if spec is not None and spec.keeps_numbers
                else None
            )
            loss: torch.Tensor = self._base.training_step(
                model, inputs, self._inputs.item_count_on_device(num_items_in_batch)
            )
        steps.train.keep("loss", loss)
        steps.train.keep("metrics", added)
        return loss

    @contextmanager
    def _around_training_step(self) -> Iterator[None]:
        trainer = self._trainer
        accumulates = not trainer.accelerator.gradient_state.sync_gradients
        if self._ranks is not None:
            # A callback may have thawed parameters.
            self._ranks.prepare(model_of(trainer))
        with (
            as_if_compiling(),
            checked_loss(trainer),
            losses_of_ranks(trainer, trains=True),
            generating_apart(trainer, self._steps),
            nullcontext() if self._ranks is None else self._ranks.without_exchange(accumulates),
        ):
            yield

    def value(self, name: str, method: Callable[..., Any], *args: Any) -> Any:
        """What a method of the base class returns in a step, by a name of its own; not called in replayed steps."""
        train = self._steps.train
        if train.is_replaying:
            return train.promise(name)
        value = method(*args)
        train.keep(name, value)
        return value

    def end_substep(self) -> None:
        """A micro batch has ended after which the optimizer does not step."""
        if self._config.accumulation == "per_micro_batch":
            self._steps.end()
        self._count_tokens()

    def end_update(self) -> None:
        """The optimizer has stepped: closes the step, which executes it."""
        self._record.stats.count_step()
        if self._steps.is_open and not self._steps.train.is_replaying and self._frees_grads():
            model_of(self._trainer).zero_grad(set_to_none=True)
        self._steps.end()
        self._count_tokens()

    # ---- the loop's sum of losses ----------------------------------------------------------------

    def log(self, tr_loss: torch.Tensor, grad_norm: torch.Tensor | float | None, *args: Any, **kwargs: Any) -> None:
        """As `Trainer._maybe_log_save_evaluate`. Loss and gradient norm come to the host in one transfer."""
        trainer = self._trainer
        logs = trainer.control.should_log and trainer.state.global_step > trainer._globalstep_last_logged
        if not logs or gathers_on_device(trainer):
            self._base._maybe_log_save_evaluate(tr_loss, grad_norm, *args, **kwargs)
            return
        with self._record.clock.during(STEP):
            if isinstance(grad_norm, torch.Tensor):
                tr_loss, grad_norm = get_runtime().transfers.to_host([tr_loss, grad_norm])
            else:
                (tr_loss,) = get_runtime().transfers.to_host([tr_loss])
        if self._filters and not self._has_explained_filter and not torch.isfinite(tr_loss).all():
            self._has_explained_filter = True
            warnings.warn(
                f"the sum of losses since the last log is {tr_loss.item()}: on XLA devices logging_nan_inf_filter=True "
                "leaves out no loss, because it would read each one on the host; logging_steps=1 shows the step",
                stacklevel=2,
            )
        self._base._maybe_log_save_evaluate(tr_loss, grad_norm, *args, **kwargs)
        # The base class sets the loss that it was given to zero, and that was the copy on the host.
        trainer._tr_loss = self._zero()

    def _zero(self) -> torch.Tensor:
        # Of shape (1,), not (): torch_xla shares uploaded scalars between tensors and so never donates
        # their buffer, which would make the step after each log another graph.
        with uploading():
            return torch.zeros(1).to(self._trainer.args.device)

    # ---- tokens ----------------------------------------------------------------------------------

    def track_tokens(self, inputs: Mapping[str, Any]) -> None:
        """As `Trainer._track_num_input_tokens`, without reads inside a step.

        In one process the tokens are counted from the batch on the host, before the step moves it to the device. In
        several processes transformers gathers the count on the device, and an override may read there: it is called
        when the step has ended.
        """
        trainer = self._trainer
        kind = str(trainer.args.include_num_input_tokens_seen)
        if kind == "no":
            return
        if not gathers_on_device(trainer) and overridden(trainer, ("_track_num_input_tokens",)) is None:
            seen = count_tokens(inputs, trainer.model, trainer.processing_class, kind)
            trainer.state.num_input_tokens_seen += seen if self._ranks is None else sum(self._ranks.ranks.gather(seen))
            return
        self._uncounted.append(inputs)
        if not self._steps.is_open:
            self._count_tokens()

    def _count_tokens(self) -> None:
        uncounted, self._uncounted = self._uncounted, []
        for inputs in uncounted:
            self._base._track_num_input_tokens(inputs)

    # ---- replays ---------------------------------------------------------------------------------

    def _may_replay(self) -> bool:
        if not self._steps.may_replay:
            return False
        reason = reason_around(self._trainer)
        if reason is None and self._config.step_replay is not True:
            reason = reason_within(self._trainer)
        if reason is not None:
            self._steps.train.refuse_replay(reason)
        return reason is None

    def _call_spec(self, model: torch.nn.Module, inputs: Any, num_items_in_batch: Any) -> CallSpec:
        trainer = self._trainer
        known = (
            self._micro_step == 0,
            trainer.current_gradient_accumulation_steps,
            trainer.loss_is_scaled_for_ga,
            id(trainer.optimizer),
            # Whether gradients outlive the step.
            self._frees_grads(),
        )
        return call_spec(trainer, model, (inputs, num_items_in_batch), self._code.present(), known=known)

    def _frees_grads(self) -> bool:
        """Whether the step frees its gradients: under "auto" if no callback and no schedule could read them."""
        if self._config.free_grads != "auto":
            return bool(self._config.free_grads)
        trainer = self._trainer
        if any(
            getattr(callback.on_optimizer_step, "__func__", None) is not TrainerCallback.on_optimizer_step
            for callback in trainer.callback_handler.callbacks
        ):
            return False
        if overridden(trainer, ("_get_learning_rate",)) is not None:
            return False
        schedule: Any = trainer.lr_scheduler
        if self._seeing[0] is not schedule:
            self._seeing = schedule, schedule_sees_gradients(getattr(schedule, "scheduler", schedule))
        # The loop steps these at evaluations, when there are no gradients.
        return isinstance(schedule, (ReduceLROnPlateau, GreedyLR)) or not self._seeing[1]


class BatchLoss:
    """The mean loss of a batch, as the evaluation loop takes it: repeated, once for each sample.

    Args:
        loss: the mean over the batch.
        samples: in the batch.
    """

    def __init__(self, loss: Any, samples: int) -> None:
        self._loss = loss
        self._samples = samples

    def repeat(self, count: int) -> torch.Tensor:
        """The loss once for each sample of the batch. `count`, the size of a full batch, is ignored."""
        repeated: torch.Tensor = self._loss.repeat(self._samples)
        return repeated


class Evaluation:
    """Evaluation and prediction of one trainer.

    Args:
        trainer: the trainer.
        base: the methods that the mixin overrides.
        steps: opens and closes the steps.
        inputs: moves batches to the device.
        session: around an evaluation loop.
        shapes: gives batches few shapes.
    """

    def __init__(
        self,
        trainer: transformers.Trainer,
        base: Any,
        steps: TrainerSteps,
        inputs: Inputs,
        session: Session,
        shapes: TrainerShapes,
    ) -> None:
        self._trainer = trainer
        self._base = base
        self._steps = steps
        self._inputs = inputs
        self._session = session
        self._shapes = shapes
        # The user's `preprocess_logits_for_metrics` while the step calls it instead of the loop.
        self._preprocess: Callable[[Any, Any], Any] | None = None
        self._code = step_code(trainer, steps.config, lambda: {"preprocess_logits_for_metrics": self._preprocess})

    @property
    def is_compiled(self) -> bool:
        """Whether evaluation steps are compiled."""
        config = self._steps.config
        return config.compiles_step and config.compile_eval

    # ---- the loop --------------------------------------------------------------------------------

    def loop(self, *args: Any, **kwargs: Any) -> Any:
        """As `Trainer.evaluation_loop`. The results of each batch come to the host in one transfer."""
        trainer = self._trainer
        with self._session.running():
            if gathers_on_device(trainer):
                return self._base.evaluation_loop(*args, **kwargs)
            ranks = get_runtime().device.ranks
            if ranks is not None:
                # All evaluate, or it is an error.
                ranks.wait(f"an evaluation after step {trainer.state.global_step}")
            with (
                self._preprocessing_in_step(),
                self._inputs.staying_on_host(True),
                self._weighing_losses(),
                self._shapes.evaluating(args[0] if args else kwargs.get("dataloader")),
            ):
                return self._base.evaluation_loop(*args, **kwargs)

    @contextmanager
    def _preprocessing_in_step(self) -> Iterator[None]:
        """Lets the step call the user's `preprocess_logits_for_metrics`, on the device, and not the loop."""
        trainer = self._trainer
        preprocess = trainer.preprocess_logits_for_metrics
        self._preprocess, trainer.preprocess_logits_for_metrics = preprocess, None
        try:
            yield
        finally:
            self._preprocess, trainer.preprocess_logits_for_metrics = None, preprocess

    @contextmanager
    def _weighing_losses(self) -> Iterator[None]:
        """Weighs the loss of each batch by the number of its samples.

        The loop repeats the loss `eval_batch_size` times for every batch and relies on accelerate to shorten the last
        one. accelerate cannot do so if the dataset has no length.
        """
        trainer = self._trainer
        method = trainer.prediction_step
        # A preference is two rows of TRL's batches.
        may_have_pairs = bool(libraries_of(trainer))
        rows_per_sample = 0

        def prediction_step(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal rows_per_sample
            loss, logits, labels = method(model, inputs, *args, **kwargs)
            rows = find_batch_size(inputs)
            if loss is not None and rows is not None:
                if not rows_per_sample:
                    rows_per_sample = max(1, rows // trainer.args.eval_batch_size) if may_have_pairs else 1
                return BatchLoss(loss, rows // rows_per_sample), logits, labels
            return loss, logits, labels

        # On the instance: only the loop gets it. A user's override that calls `super()` gets the loss as it is.
        with replaced(trainer, "prediction_step", prediction_step):
            yield

    # ---- a step ----------------------------------------------------------------------------------

    def step(
        self, model: torch.nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor | None, Any, Any]:
        """As `Trainer.prediction_step`, compiled as one graph under `compile_eval`."""
        with self._inputs.staying_on_host(False):
            spec, length, cut = None, "", None
            generated = generates_batches(self._trainer)
            if not generated:
                inputs, length, cut = self._shapes.of_evaluation(inputs, preprocesses=self._preprocess is not None)
            else:
                with generating(self._trainer, model, self._steps.generation, self._inputs):
                    inputs = self._trainer._prepare_inputs(inputs)
                inputs = self._inputs.uploaded(inputs)
            if self.is_compiled and self._may_replay():
                inputs = inputs if generated else self._inputs.before_step(inputs)
                spec = self._call_spec(model, inputs, (prediction_loss_only, repr((args, kwargs))))

            notes = spec is not None and spec.keeps_numbers
            mode = "train" if model.training else "eval"

            def compute() -> tuple[Any, Any, Any]:
                with (
                    metrics_added(self._trainer, mode) if notes else nullcontext() as added,
                    losses_of_ranks(self._trainer, trains=False),
                    self._inputs.counting_alone(),
                ):
                    loss, logits, labels = self._base.prediction_step(
                        model, inputs, prediction_loss_only, *args, **kwargs
                    )
                evaluation = self._steps.evaluation[EVALUATION]
                evaluation.keep("metrics", added)
                if self._preprocess is not None and logits is not None:
                    logits = self._preprocess(logits, labels)
                return loss, copies(logits) if evaluation.is_open else logits, labels

            phase = ("evaluation, loss only" if prediction_loss_only else "evaluation") + length
            with self._steps.evaluation_step(EVALUATION, inputs, phase=phase, replay=spec) as step:
                with as_if_compiling(), prepared(self._trainer) if generated else nullcontext():
                    if notes and step.is_replaying:
                        add_metrics(self._trainer, mode, step.promise("metrics"))
                    results: tuple[Any, Any, Any] = step.outputs(compute)
        if not gathers_on_device(self._trainer):
            results = to_host_in_one_transfer(results)
        return results if cut is None else cut(results)

    @contextmanager
    def generating(self, model: torch.nn.Module) -> Iterator[None]:
        """Around a `prediction_step` that generates: it sees tensors on the host, and its uses of the model are
        compiled.

        Args:
            model: the model that the step is called with.
        """
        with (
            self._inputs.staying_on_host(True),
            compiled_generation(self._trainer.model, model, self._steps.generation, self._shapes),
        ):
            yield

    # ---- replays ---------------------------------------------------------------------------------

    def _may_replay(self) -> bool:
        if not self._steps.may_replay:
            return False
        reason = None
        if getattr(self._trainer.args, "past_index", -1) >= 0:
            reason = "past_index is given: each step hands something on to the next"
        elif self._steps.config.step_replay is not True:
            reason = reason_within(self._trainer, trains=False)
        if reason is None and appends_metrics(self._trainer):
            reason = metrics_reason(self._trainer)
            if not is_trusted(self._base.prediction_step):
                reason = "prediction_step of TRL is overridden, and may do other things with the metrics"
        if reason is not None:
            self._steps.evaluation[EVALUATION].refuse_replay(reason)
        return reason is None

    def _call_spec(self, model: torch.nn.Module, inputs: Any, known: tuple[Any, ...]) -> CallSpec:
        trainer = self._trainer
        known = (*known, tuple(trainer.label_names), trainer.can_return_loss)
        return call_spec(trainer, model, inputs, self._code.present(), known=known, trains=False)
