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
        self.model.eval()
        with self._session():
            return generation.generate(self.model, inputs, program=self._steps.generation, **kwargs)


class Seq2SeqTrainer(XLATrainerMixin, transformers.Seq2SeqTrainer):
    """`transformers.Seq2SeqTrainer` on XLA devices; `predict_with_generate` runs one graph per token."""

    generate = Trainer.generate

    def prediction_step(
        self,
        model: torch.nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
        **gen_kwargs: Any,
    ) -> tuple[torch.Tensor | None, Any, Any]:
        """As `Seq2SeqTrainer.prediction_step`."""
        generates = self.args.predict_with_generate and not prediction_loss_only
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
        model_generate = self.model.generate

        def generate(inputs: torch.Tensor | None = None, **kwargs: Any) -> Any:
            self.model.generate = model_generate
            try:
                return generation.generate(self.model, inputs, program=program, **kwargs)
            finally:
                self.model.generate = generate

        keeps_on_host, self._keep_inputs_on_host = self._keep_inputs_on_host, True
        self.model.generate = generate
        try:
            with generation.compiled_forward(model, program, results_on_host=True):
                results: tuple[torch.Tensor | None, Any, Any] = transformers.Seq2SeqTrainer.prediction_step(
                    self, model, inputs, False, ignore_keys, **gen_kwargs
                )
        finally:
            del self.model.generate
            self._keep_inputs_on_host = keeps_on_host
        return results
