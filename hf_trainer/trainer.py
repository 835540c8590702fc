"""The trainers: transformers' own with the mixin before them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch
import transformers

from hf_trainer.generation import generate
from hf_trainer.mixin import XLATrainerMixin

if TYPE_CHECKING:
    from xla_adapters.tools.preflight_report import PreflightReport


class Trainer(XLATrainerMixin, transformers.Trainer):
    """`transformers.Trainer` on XLA devices: the same arguments, and those of `XLATrainerMixin`."""

    def preflight(
        self, topology: str, *, timeout: float = 900, save_programs: str | os.PathLike[str] | None = None
    ) -> PreflightReport:
        """Compiles the training's steps for TPUs that are not there: whether they fit, and what bounds them.

        The trainer is constructed once more in another process, with the first samples of its datasets and without the
        values of its parameters, and traced there; nothing is run. The report of the next training has the result, too.

        Args:
            topology: generation, and chips along each dimension, as `"v5e:2x4"`.
            timeout: seconds for tracing, and for each compile.
            save_programs: a folder. The training also runs for two updates on the CPU, and all that it compiles is
                compiled for the slice and saved there: a run on it with this folder as `cache_dir=` loads that.

        Returns:
            The report of all steps; `str()` gives it as text, and its `fits` says whether all of them fit.

        Raises:
            ConfigError: there is no such slice, or what traces with TorchTPU is not installed; or programs cannot be
                saved in the folder.
            UnsupportedOptionError: programs are to be saved of TorchTPU, or of several hosts.
        """
        # Late: trainings need none of it.
        from hf_trainer.check import preflight

        return preflight(self, topology, timeout=timeout, save_programs=save_programs)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """`model.generate` with the model on the device, which calls one compiled graph for each token.

        Args:
            args, kwargs: as for `model.generate`; tensors may be on the host.

        Returns:
            As `model.generate`, on the host.
        """
        model: Any = self.model
        model.eval()
        with self._xla.session.running():
            generation = self._xla.steps.generation
            return generate(model, *args, generation=generation, shapes=self._xla.shapes, **kwargs)


class Seq2SeqTrainer(XLATrainerMixin, transformers.Seq2SeqTrainer):
    """`transformers.Seq2SeqTrainer` on XLA devices: the same arguments, and those of `XLATrainerMixin`.

    `predict_with_generate` calls one compiled graph for each token.
    """

    generate = Trainer.generate
    preflight = Trainer.preflight

    def prediction_step(  # type: ignore[override]
        self,
        model: torch.nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
        **gen_kwargs: Any,
    ) -> tuple[torch.Tensor | None, Any, Any]:
        """As `Seq2SeqTrainer.prediction_step`. A step that generates runs on the host, only its model calls on XLA."""
        generates = getattr(self.args, "predict_with_generate", False) and not prediction_loss_only
        if not generates or not self._xla.evaluation.is_compiled:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys, **gen_kwargs)
        with self._xla.evaluation.generating(model):
            # Not the mixin's: a step with hundreds of tokens would not be one graph.
            results: Any = transformers.Seq2SeqTrainer.prediction_step(
                self, model, inputs, False, ignore_keys, **gen_kwargs
            )
        loss, tokens, labels = results
        return loss, tokens, labels
