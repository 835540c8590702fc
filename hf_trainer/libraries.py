"""Libraries of trainers that are known: TRL and sentence-transformers, which read values in the middle of a step."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device
from transformers import Trainer

from hf_trainer.data import Inputs
from hf_trainer.generation import Generation, TrainerSteps, compiled_forward, compiled_generation, generate
from hf_trainer.replay import SCORES
from xla_adapters import StepProgram, get_runtime
from xla_adapters.runtime import eager
from xla_adapters.runtime.transfers import to_host_in_one_transfer, uploading
from xla_adapters.tracing.deferred_numbers import make_plain
from xla_adapters.tracing.discarding import Discarding
from xla_adapters.tracing.library_reads import LibraryReads, allowing_reads, reads_of_packages
from xla_adapters.utils.patching import replaced
from xla_adapters.utils.torch_modes import as_if_compiling

# Packages whose reads inside a step are for their logs, or for a decision that they make again in each step.
_PACKAGES = ("trl", "sentence_transformers")
# Of TRL's trainers that generate.
_LOG_PROBABILITIES = "_get_per_token_logps_and_entropies"


def library_of(cls: type) -> str | None:
    """The known package that a class is defined in; None if it is in no known one."""
    package = cls.__module__.partition(".")[0]
    return package if package in _PACKAGES else None


def libraries_of(trainer: Trainer) -> set[str]:
    """The known packages that the classes of a trainer are defined in."""
    return {package for cls in type(trainer).__mro__ if (package := library_of(cls)) is not None}


def reads_of(trainer: Trainer) -> LibraryReads | None:
    """The reads that the steps of a trainer allow; None if it uses no known library."""
    return reads_of_packages(libraries_of(trainer), trainer.model)


@contextmanager
def reads_allowed(trainer: Trainer) -> Iterator[None]:
    """Inside the context, steps allow the reads of the libraries that a trainer uses.

    Those of `nanmin` and `nanmax`, by which TRL computes metrics of GRPO, decide whether there is a number at all.
    They are replaced by others that decide on the device. `disable_gradient_checkpointing` of TRL is replaced, too. The
    losses of sentence-transformers that compute embeddings twice (`CachedMultipleNegativesRankingLoss`) put back the
    random numbers of the device, too.
    """
    reads = reads_of(trainer)
    with ExitStack() as stack:
        cached = sys.modules.get("sentence_transformers.base.losses.gradcache")
        if reads is not None and cached is not None and not get_runtime().has_placeholders:
            context = _random_context(cached.RandContext)
            for module in _importing(cached, "RandContext"):
                stack.enter_context(replaced(module, "RandContext", context))
        if reads is not None and (utils := sys.modules.get("trl.trainer.utils")) is not None:
            for name, extreme in (("nanmin", _nan_minimum), ("nanmax", _nan_maximum)):
                for module in _importing(utils, name):
                    stack.enter_context(replaced(module, name, extreme))
        models = sys.modules.get("trl.models.utils")
        if reads is not None and models is not None:
            for module in _importing(models, "disable_gradient_checkpointing"):
                stack.enter_context(replaced(module, "disable_gradient_checkpointing", _without_checkpointing))
        stack.enter_context(allowing_reads(reads))
        yield


def _importing(utils: ModuleType, name: str) -> list[ModuleType]:
    """The modules of a function's package that have it, also under this name; none if there is no such function."""
    function = getattr(utils, name, None)
    package = utils.__name__.partition(".")[0]
    loaded = [module for at, module in list(sys.modules.items()) if at.startswith(f"{package}.")]
    return [module for module in loaded if function is not None and vars(module).get(name) is function]


def _random_context(base: Any) -> type:
    """A class derived from the `RandContext` of sentence-transformers, for the random numbers of an XLA device."""
    random = get_runtime().random

    class DeviceRandomContext(base):  # type: ignore[misc]
        """Puts back the random state from when it was made, inside the context."""

        def __init__(self, *tensors: torch.Tensor) -> None:
            # Not with the tensors: it would look for a `torch.xla` that has their random state.
            super().__init__()
            self._position = random.position()
            self._present: Any = None

        def __enter__(self) -> None:
            super().__enter__()
            self._present = random.seed()
            random.set_seed(self._position)

        def __exit__(self, *error: object) -> None:
            random.set_seed(self._present)
            super().__exit__(*error)

    return DeviceRandomContext


def _nan_minimum(tensor: torch.Tensor) -> torch.Tensor:
    """As `trl.trainer.utils.nanmin`: the least number, or NaN if there is none."""
    missing = tensor.isnan()
    return torch.where(missing.all(), math.nan, tensor.masked_fill(missing, math.inf).amin())


def _nan_maximum(tensor: torch.Tensor) -> torch.Tensor:
    """As `trl.trainer.utils.nanmax`."""
    return -_nan_minimum(-tensor)


@contextmanager
def _without_checkpointing(model: torch.nn.Module, *_: Any, **__: Any) -> Iterator[None]:
    """As `trl.models.utils.disable_gradient_checkpointing`, which adds one more hook to the embeddings each time."""
    modules = [module for module in model.modules() if getattr(module, "gradient_checkpointing", False)]
    try:
        for module in modules:
            module.gradient_checkpointing = False  # type: ignore[assignment]
        yield
    finally:
        for module in modules:
            module.gradient_checkpointing = True  # type: ignore[assignment]


def before_log(trainer: Trainer) -> None:
    """Makes the numbers that a known library keeps in the trainer plain ones: it may give them to code in C."""
    if libraries_of(trainer):
        for name, value in list(vars(trainer).items()):
            # Public ones are the user's: arguments, data sets.
            if name.startswith("_") and name != "_xla":
                vars(trainer)[name] = make_plain(value)


def generates_batches(trainer: Trainer) -> bool:
    """Whether a known library makes the batch of a step by generating, as for GRPO: that is no part of the step."""
    for cls in type(trainer).__mro__:
        if "_prepare_inputs" in vars(cls) and cls.__module__.partition(".")[0] != "hf_trainer":
            return library_of(cls) is not None
    return False


@contextmanager
def generating(trainer: Trainer, model: torch.nn.Module, generation: Generation, inputs: Inputs) -> Iterator[None]:
    """Around `trainer._prepare_inputs` of a trainer that generates: uses of the model are compiled.

    What TRL computes of the completions and their rewards is computed on the host. It reads most of it at once.

    Args:
        trainer: the trainer.
        model: what it is called with.
        generation: runs, replays and explains the graphs of the model.
        inputs: moves batches to the device.
    """
    with ExitStack() as stack:
        stack.enter_context(eager(False))
        stack.enter_context(compiled_generation(trainer.model, model, generation))
        if hasattr(trainer, SCORES):
            host = torch.device("cpu")
            stack.enter_context(replaced(Accelerator, "device", property(lambda accelerator: host)))
            stack.enter_context(inputs.staying_on_host(True))
            # Otherwise TRL switches it off and on again, which makes other hooks each time.
            stack.enter_context(_without_checkpointing(model))
            stack.enter_context(replaced(trainer, _LOG_PROBABILITIES, _compiled(trainer, generation.program)))
            for judge in trainer.reward_funcs:  # type: ignore[attr-defined]
                if isinstance(judge, torch.nn.Module):
                    stack.enter_context(compiled_forward(judge, generation, to_host_in_one_transfer))
        yield


def _compiled(trainer: Any, program: StepProgram) -> Callable[..., Any]:
    """TRL's method that computes the log-probabilities of completions, as one graph; its results are on the host."""
    own = getattr(trainer, _LOG_PROBABILITIES)

    def log_probabilities(model: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        with uploading():
            args, kwargs = send_to_device((args, kwargs), trainer.args.device)
        with Discarding(program):
            program.open(inputs=args, phase="log-probabilities of completions")
            with torch.no_grad(), as_if_compiling():
                computed = own(model, *args, **kwargs)
            program.close()
        return to_host_in_one_transfer(computed)

    return log_probabilities


@contextmanager
def generating_apart(trainer: Trainer, steps: TrainerSteps) -> Iterator[None]:
    """Inside the context, `generate` of a known library's trainer is no part of the open step, which goes on after it.

    For trainers that generate in their `training_step`, as for online DPO and on-policy distillation.

    Args:
        trainer: the trainer.
        steps: have the open step.
    """
    model: Any = trainer.model
    if not libraries_of(trainer) or not hasattr(model, "generate"):
        yield
        return
    own = model.generate

    def apart(*args: Any, **kwargs: Any) -> Any:
        with steps.between_parts(), replaced(model, "generate", own), as_if_compiling(False):
            generated = generate(model, *args, generation=steps.generation, **kwargs)
        with uploading():
            return send_to_device(generated, trainer.args.device)

    with replaced(model, "generate", apart):
        yield


@contextmanager
def prepared(trainer: Trainer) -> Iterator[None]:
    """Inside the context the trainer takes its batch as it is."""

    def as_it_is(inputs: dict[str, Any]) -> dict[str, Any]:
        return inputs

    with replaced(trainer, "_prepare_inputs", as_it_is):
        yield
