"""What a program of the corpus is, and how one is built anew for each run."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tests.replay.reachable import installed

# In this order; each is `programs_<name>.py`.
FILES = (
    "plain", "containers", "optimizers", "callables", "batches", "tensors", "ambient", "attributes", "installed",
    "hf", "lightning",
)  # fmt: skip
# Whatever is imported below these is the user's code.
USER_MODULES = ("tests.replay.reachable.programs_", "reachable_helpers")


@dataclass(kw_only=True)
class Loop:
    """A loop of one's own, built.

    Attributes:
        step: the function that is made a `CompiledStep`.
        batch: the arguments of the step with this number.
        model, optimizers: whose state is compared at the end.
        after: what the loop does after the step with this number, e.g. to step a schedule.
        end: what the loop does at last, e.g. to leave a mode: the next program begins in the same process.
        roots: further objects that the loop holds, by name: changed like what the step itself reaches.
        modules: of `CompiledStep`.
    """

    step: Callable[..., Any]
    batch: Callable[[int], tuple[Any, ...]]
    model: nn.Module
    optimizers: tuple[torch.optim.Optimizer, ...] = ()
    after: Callable[[int], object] | None = None
    end: Callable[[], object] | None = None
    roots: Mapping[str, Any] = field(default_factory=dict)
    modules: tuple[nn.Module, ...] = ()


@dataclass(kw_only=True)
class TrainerRun:
    """A training with the HF Trainer, built.

    Attributes:
        model, data, trainer_class, callbacks, args: of the trainer.
        options: further ones of the trainer.
        roots: further objects that the user's code holds, by name.
    """

    model: nn.Module
    data: Any
    trainer_class: Any = None
    callbacks: tuple[Any, ...] = ()
    args: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    roots: Mapping[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class LightningRun:
    """A training with Lightning, built; the attributes are as of `TrainerRun`, `options` of Lightning's Trainer."""

    module: Any
    data: Any
    callbacks: tuple[Any, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    roots: Mapping[str, Any] = field(default_factory=dict)


Built = Loop | TrainerRun | LightningRun


@dataclass(frozen=True)
class Program:
    """One of the corpus.

    Attributes:
        name: unique in the corpus.
        module: that holds it.
        function: builds it, once for each run.
        plain: whether its step is expected to be replayed while nothing changes.
    """

    name: str
    module: str
    function: str
    plain: bool

    def build(self) -> Built:
        """Builds it in a module that is imported anew: classes and globals are as at first, too."""
        installed.install()
        sys.modules.pop(self.module, None)
        module = importlib.import_module(self.module)
        built: Built = getattr(module, self.function)()
        return built


def program(*, plain: bool = False) -> Callable[[Callable[[], Built]], Callable[[], Built]]:
    """Decorates a function that builds a program.

    Args:
        plain: whether it is expected to be replayed while nothing changes.
    """

    def mark(function: Callable[[], Built]) -> Callable[[], Built]:
        function.reachable_plain = plain  # type: ignore[attr-defined]
        return function

    return mark


@functools.cache
def corpus() -> dict[str, Program]:
    """All programs by name, in the order of their files."""
    found: dict[str, Program] = {}
    installed.install()
    for file in FILES:
        name = f"{__package__}.programs_{file}"
        module = importlib.import_module(name)
        for function, value in vars(module).items():
            plain = getattr(value, "reachable_plain", None)
            if plain is not None:
                assert function not in found, f"two programs are named {function}"
                found[function] = Program(function, name, function, plain)
    return found
