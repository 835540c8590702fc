"""The trainers: transformers' own with the mixin before them."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from hf_trainer import generation
from hf_trainer.mixin import XLATrainerMixin


class Trainer(XLATrainerMixin, transformers.Trainer):
    """`transformers.Trainer` on XLA devices: the same arguments, and those of `XLATrainerMixin`."""

    def generate(self, inputs: torch.Tensor | None = None, **kwargs: Any) -> Any:
        """`model.generate` with the model on the device: one compiled graph per token.

        Args:
            inputs, kwargs: as for `model.generate`; tensors may be on the host.

        Returns:
            As `model.generate`, on the host.
        """
        model: Any = self.model
        model.eval()
        with self._session():
            return generation.generate(model, inputs, program=self._steps.generation, **kwargs)


class Seq2SeqTrainer(XLATrainerMixin, transformers.Seq2SeqTrainer):
    """`transformers.Seq2SeqTrainer` on XLA devices; `predict_with_generate` runs one graph per token."""

    generate = Trainer.generate

    def prediction_step(  # type: ignore[override]
        self,
        model: torch.nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
        **gen_kwargs: Any,
    ) -> tuple[torch.Tensor | None, Any, Any]:
        """As `Seq2SeqTrainer.prediction_step`."""
        generates = getattr(self.args, "predict_with_generate", False) and not prediction_loss_only
        if not generates or not (self.xla_config.compiles_step and self.xla_config.compile_eval):
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys, **gen_kwargs)
        return self._generating_prediction_step(model, inputs, ignore_keys, gen_kwargs)

    def _generating_prediction_step(
        self,
        model: torch.nn.Module,
        inputs: dict[str, Any],
        ignore_keys: list[str] | None,
        gen_kwargs: dict[str, Any],
    ) -> tuple[torch.Tensor | None, Any, Any]:
        """The base class's step on host tensors, its two uses of the model compiled."""
        program = self._steps.generation
        owner: Any = self.model
        model_generate = owner.generate

        def generate(inputs: torch.Tensor | None = None, **kwargs: Any) -> Any:
            owner.generate = model_generate
            try:
                return generation.generate(owner, inputs, program=program, **kwargs)
            finally:
                owner.generate = generate

        keeps_on_host, self._keep_inputs_on_host = self._keep_inputs_on_host, True
        owner.generate = generate
        try:
            with generation.compiled_forward(model, program, results_on_host=True):
                results: Any = transformers.Seq2SeqTrainer.prediction_step(
                    self, model, inputs, False, ignore_keys, **gen_kwargs
                )
        finally:
            del owner.generate
            self._keep_inputs_on_host = keeps_on_host
        loss, tokens, labels = results
        return loss, tokens, labels
