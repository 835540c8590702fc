"""Evaluation hooks: each batch is one compiled step, and its results come to the host in one transfer."""

from __future__ import annotations

from typing import Any

import torch

from hf_trainer.framework_patches import as_if_compiling
from hf_trainer.replay import own_code, request_of
from hf_trainer.trainer_hooks import TrainerHooks
from xla_adapters.program import ReplayRequest, discarding
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

    def _evaluation_replay(self, model: torch.nn.Module, inputs: Any, known: tuple[Any, ...]) -> ReplayRequest | None:
        preprocess = self._preprocess_in_step
        if getattr(self.args, "past_index", -1) >= 0:
            self._steps.evaluation.refuse_replay("past_index is given: each step hands something on to the next")
            return None
        known_code = self._own_evaluation
        if known_code is None or known_code[0] is not self.model or known_code[1] is not preprocess:
            known_code = self._own_evaluation = (self.model, preprocess, own_code(self, evaluates=True))
        code = known_code[2]
        known = (*known, id(preprocess), tuple(self.label_names), self.can_return_loss)
        return request_of(self, model, inputs, code, known=known, trains=False)

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
            if compiled:
                phase = "evaluation, loss only" if prediction_loss_only else "evaluation"
                replay = None
                if self._steps.may_replay:
                    inputs = self._prepare_inputs(inputs)
                    replay = self._evaluation_replay(model, inputs, (prediction_loss_only, repr((args, kwargs))))
                self._steps.begin_evaluation_step(inputs, phase, replay)
            with discarding(self._steps), as_if_compiling():
                loss, logits, labels = self._steps.evaluation.outputs(compute)
        finally:
            self._keep_inputs_on_host = keeps_on_host
        if compiled:
            self._steps.evaluation.close()
        if self.args.world_size > 1:
            return loss, logits, labels
        results: tuple[Any, Any, Any] = to_host_in_one_transfer((loss, logits, labels))
        return results
