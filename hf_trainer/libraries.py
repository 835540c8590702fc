"""Libraries of trainers that are known: TRL, whose trainers read metrics in `compute_loss` in order to log them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import Trainer

from hf_trainer.generation import compiled_generation
from xla_adapters import StepProgram
from xla_adapters.runtime.modes import eager
from xla_adapters.tracing.library_reads import LibraryReads, reads_of_packages
from xla_adapters.utils.patching import replaced

# Packages whose reads inside a step are for their logs, or for a decision that they make again in each step.
_PACKAGES = ("trl",)


def library_of(cls: type) -> str | None:
    """The known package that a class is defined in; None if it is in no known one."""
    package = cls.__module__.partition(".")[0]
    return package if package in _PACKAGES else None


def reads_of(trainer: Trainer) -> LibraryReads | None:
    """The reads that the steps of a trainer answer; None if it uses no known library."""
    packages = {package for cls in type(trainer).__mro__ if (package := library_of(cls)) is not None}
    return reads_of_packages(packages, trainer.model)


def generates_batches(trainer: Trainer) -> bool:
    """Whether a known library makes the batch of a step by generating, as for GRPO: that is no part of the step."""
    for cls in type(trainer).__mro__:
        if "_prepare_inputs" in vars(cls) and cls.__module__.partition(".")[0] != "hf_trainer":
            return library_of(cls) is not None
    return False


@contextmanager
def generating(trainer: Trainer, model: torch.nn.Module, program: StepProgram) -> Iterator[None]:
    """Around `trainer._prepare_inputs` of a trainer that generates: uses of the model are compiled, the rest is traced
    and executed where its values are read.

    Args:
        trainer: the trainer.
        model: what it is called with.
        program: runs and explains the graphs of the model.
    """
    with eager(False), compiled_generation(trainer.model, model, program):
        yield


@contextmanager
def prepared(trainer: Trainer) -> Iterator[None]:
    """Inside the context the trainer takes its batch as it is."""

    def as_it_is(inputs: dict[str, Any]) -> dict[str, Any]:
        return inputs

    with replaced(trainer, "_prepare_inputs", as_it_is):
        yield
