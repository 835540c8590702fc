"""Evaluation hooks: each batch is one compiled step, and its results come to the host in one transfer."""

from __future__ import annotations

from typing import Any

import torch

from hf_trainer.framework_patches import as_if_compiling
from hf_trainer.own_code import StepCode
from hf_trainer.replay import obstacle_within, request_of
from hf_trainer.trainer_hooks import TrainerHooks
from xla_adapters.discarding import Discarding
from xla_adapters.program import ReplayRequest
from xla_adapters.transfers import to_host_in_one_transfer


class EvaluationHooks(TrainerHooks):
    """Evaluation and prediction."""

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """As `Trainer.evaluation_loop`; the results of each batch come to the host in one transfer."""
        preprocess = self.preprocess_logits_for_metrics
        if self.args.world_size == 1:
            # It runs on the device, inside the evaluation step, and not again in the loop.
            self._preprocess_in_step = preprocess
            self.preprocess_logits_for_metrics = None
            self._keep_inputs_on_host = True
        try:
            with self._session():
                return super().evaluation_loop(*args, **kwargs)
        finally:
            self._preprocess_in_step = None
            self._keep_inputs_on_host = False
            self.preprocess_logits_for_metrics = preprocess

    def _may_replay_evaluation(self) -> bool:
        if not self._steps.may_replay:
            return False
        obstacle = None
        if getattr(self.args, "past_index", -1) >= 0:
            obstacle = "past_index is given: each step hands something on to the next"
        elif self.xla_config.step_replay is not True:
            obstacle = obstacle_within(self, trains=False)
        if obstacle is not None:
            self._steps.evaluation.refuse_replay(obstacle)
        return obstacle is None

    def _evaluation_replay(self, model: torch.nn.Module, inputs: Any, known: tuple[Any, ...]) -> ReplayRequest:
        if self._own_evaluation is None:
            self._own_evaluation = StepCode(self, evaluates=True)
        known = (*known, tuple(self.label_names), self.can_return_loss)
        return request_of(self, model, inputs, self._own_evaluation.present(), known=known, trains=False)

    def prediction_step(
        self, model: torch.nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor | None, Any, Any]:
        """As `Trainer.prediction_step`, compiled as one graph under `compile_eval`."""
        compiled = self.xla_config.compiles_step and self.xla_config.compile_eval
        keeps_on_host, self._keep_inputs_on_host = self._keep_inputs_on_host, False
        predict = super().prediction_step

        def compute() -> tuple[Any, Any, Any]:
            loss, logits, labels = predict(model, inputs, prediction_loss_only, *args, **kwargs)
            if self._preprocess_in_step is not None and logits is not None:
                logits = self._preprocess_in_step(logits, labels)
            return loss, logits, labels

        try:
            phase = "evaluation, loss only" if prediction_loss_only else "evaluation"
            replay = None
            if compiled and self._may_replay_evaluation():
                inputs = self._found_by_step(inputs)
                replay = self._evaluation_replay(model, inputs, (prediction_loss_only, repr((args, kwargs))))
            with Discarding(self._steps):
                if compiled:
                    self._steps.begin_evaluation_step(inputs, phase, replay)
                with as_if_compiling():
                    loss, logits, labels = self._steps.evaluation.outputs(compute)
                if compiled:
                    self._steps.evaluation.close()
        finally:
            self._keep_inputs_on_host = keeps_on_host
        if self.args.world_size > 1:
            return loss, logits, labels
        results: tuple[Any, Any, Any] = to_host_in_one_transfer((loss, logits, labels))
        return results
