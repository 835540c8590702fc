"""`Session`: the state of transformers, torch and the runtime during a run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import transformers

from hf_trainer.framework_patches import correct_process_index, trainer_patches
from hf_trainer.libraries import reads_answered
from hf_trainer.model_sharding import ModelSharding
from hf_trainer.placement import model_of
from hf_trainer.step_driver import StepDriver
from xla_adapters import XLAConfig, get_runtime
from xla_adapters.runtime.modes import eager
from xla_adapters.tracing.undo_log import release_retired
from xla_adapters.utils.torch_modes import modules_compiled, use_no_grad_for_inference_mode


class Session:
    """What must hold while a trainer trains, evaluates, predicts or generates: patches, eager mode, shardings.

    Args:
        trainer: the trainer.
        config: how steps are run.
        steps: discards steps that are still open at the end.
        sharding: of the trainer's model.
    """

    def __init__(
        self, trainer: transformers.Trainer, config: XLAConfig, steps: StepDriver, sharding: ModelSharding
    ) -> None:
        self._trainer = trainer
        self._config = config
        self._steps = steps
        self._sharding = sharding
        self._is_running = False

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
            use_no_grad_for_inference_mode(model_of(self._trainer))
            stack.enter_context(trainer_patches())
            stack.enter_context(reads_answered(self._trainer))
            stack.enter_context(eager(self._config.eager_by_default))
            stack.enter_context(self._sharding.applied())
            if self._config.xla_mode == "eager+dynamo":
                model = model_of(self._trainer)
                stack.enter_context(modules_compiled([model], get_runtime().dynamo_backend))
            try:
                yield
            finally:
                self._steps.abort()
                release_retired()
