"""`Evaluation`: each batch is one compiled step, and its results come to the host in one transfer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import transformers
from transformers.trainer_pt_utils import find_batch_size

from hf_trainer.framework_patches import as_if_compiling
from hf_trainer.generation import compiled_generation
from hf_trainer.inputs import Inputs
from hf_trainer.libraries import generates_batches, generating, libraries_of, prepared
from hf_trainer.replay import call_spec, obstacle_within
from hf_trainer.session import Session
from hf_trainer.step_driver import StepDriver
from hf_trainer.user_code import StepCode
from xla_adapters.replay.call_spec import CallSpec
from xla_adapters.runtime.transfers import to_host_in_one_transfer
from xla_adapters.tracing.discarding import Discarding
from xla_adapters.utils.patching import replaced


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
    """

    def __init__(
        self, trainer: transformers.Trainer, base: Any, steps: StepDriver, inputs: Inputs, session: Session
    ) -> None:
        self._trainer = trainer
        self._base = base
        self._steps = steps
        self._inputs = inputs
        self._session = session
        # The user's `preprocess_logits_for_metrics` while the step calls it instead of the loop.
        self._preprocess: Callable[[Any, Any], Any] | None = None
        self._code = StepCode(
            trainer, steps.config, functions=lambda: {"preprocess_logits_for_metrics": self._preprocess}
        )

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
            if trainer.args.world_size > 1:
                return self._base.evaluation_loop(*args, **kwargs)
            with self._preprocessing_in_step(), self._inputs.staying_on_host(True), self._weighing_losses():
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
            spec = None
            generated = generates_batches(self._trainer)
            if generated:
                with generating(self._trainer, model, self._steps.generation):
                    inputs = self._trainer._prepare_inputs(inputs)
            if self.is_compiled and self._may_replay():
                inputs = self._inputs.before_step(inputs)
                spec = self._call_spec(model, inputs, (prediction_loss_only, repr((args, kwargs))))

            def compute() -> tuple[Any, Any, Any]:
                loss, logits, labels = self._base.prediction_step(model, inputs, prediction_loss_only, *args, **kwargs)
                if self._preprocess is not None and logits is not None:
                    logits = self._preprocess(logits, labels)
                return loss, logits, labels

            with Discarding(self._steps):
                if self.is_compiled:
                    phase = "evaluation, loss only" if prediction_loss_only else "evaluation"
                    self._steps.begin_evaluation_step(inputs, phase, spec)
                with as_if_compiling(), prepared(self._trainer) if generated else nullcontext():
                    results: tuple[Any, Any, Any] = self._steps.evaluation.outputs(compute)
                if self.is_compiled:
                    self._steps.evaluation.close()
        if self._trainer.args.world_size == 1:
            results = to_host_in_one_transfer(results)
        return results

    @contextmanager
    def generating(self, model: torch.nn.Module) -> Iterator[None]:
        """Around a `prediction_step` that generates: it sees tensors on the host, and its uses of the model are
        compiled.

        Args:
            model: the model that the step is called with.
        """
        with (
            self._inputs.staying_on_host(True),
            compiled_generation(self._trainer.model, model, self._steps.generation),
        ):
            yield

    # ---- replays ---------------------------------------------------------------------------------

    def _may_replay(self) -> bool:
        if not self._steps.may_replay:
            return False
        obstacle = None
        if getattr(self._trainer.args, "past_index", -1) >= 0:
            obstacle = "past_index is given: each step hands something on to the next"
        elif self._steps.config.step_replay is not True:
            obstacle = obstacle_within(self._trainer, trains=False)
        if obstacle is not None:
            self._steps.evaluation.refuse_replay(obstacle)
        return obstacle is None

    def _call_spec(self, model: torch.nn.Module, inputs: Any, known: tuple[Any, ...]) -> CallSpec:
        trainer = self._trainer
        known = (*known, tuple(trainer.label_names), trainer.can_return_loss)
        return call_spec(trainer, model, inputs, self._code.present(), known=known, trains=False)
