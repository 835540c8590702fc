"""The user code in the steps of a trainer, and whether a replay may skip it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

from transformers import PreTrainedModel, Trainer
from transformers.loss.loss_utils import LOSS_MAPPING
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from xla_adapters import XLAConfig
from xla_adapters.replay.safety import (
    DATA,
    MODULE_CALLS,
    UNKNOWN,
    Analysis,
    FrameworkModel,
    Unsafe,
    Value,
    is_trusted,
    nothing,
)
from xla_adapters.replay.tracked_code import TrackedCode

# Methods of classes in these packages are not user code.
_LIBRARIES = ("transformers.", "hf_trainer.")
_FRAMEWORK = FrameworkModel(
    calls={**MODULE_CALLS, Trainer.compute_loss: nothing},
    properties=dict.fromkeys(("device", "dtype"), nothing),
)
# Functions that the user passes to the trainer.
_GIVEN = ("compute_loss_func", "preprocess_logits_for_metrics")
# Prefix of the names of loss functions of a library's models.
_LOSS = "loss_function"
# Registries in which a library's model looks up its attention and its masks.
_INTERFACES = {"attention function": ALL_ATTENTION_FUNCTIONS, "attention mask": ALL_MASK_ATTENTION_FUNCTIONS}


class StepCode:
    """Finds the user code in one kind of step of a trainer and keeps its safety analysis up to date.

    The user may replace the trainer's functions at any time. Then everything is analysed again, and executables
    recorded before are not used any more.

    Args:
        trainer: the trainer.
        config: with `step_replay=True` the user promises that the code is safe.
        functions: returns further functions that the steps call, by name (default: none).
    """

    def __init__(self, trainer: Any, config: XLAConfig, *, functions: Callable[[], Mapping[str, Any]] = dict) -> None:
        self._trainer = trainer
        self._config = config
        self._further = functions
        # References, so that no new function can get the id of one of these.
        self._functions: dict[str, Any] = {}
        self._models: dict[str, PreTrainedModel] = {}
        self._code: TrackedCode | None = None

    def present(self) -> TrackedCode:
        """The analysis of the code as it is now."""
        functions = self._found()
        if self._code is not None and _are_the_same(functions, self._functions):
            self._code.follow()
            return self._code
        if functions["forward"] is not self._functions.get("forward"):
            modules = self._trainer.model.named_modules()
            self._models = {name: part for name, part in modules if isinstance(part, PreTrainedModel)}
            functions = self._found()
        self._functions = functions
        promised: list[Any] | None = [] if self._config.step_replay is True else None
        self._code = TrackedCode(_FRAMEWORK, functools.partial(_examine, self._trainer, functions), promised=promised)
        return self._code

    def _found(self) -> dict[str, Any]:
        trainer = self._trainer
        found = {
            "forward": trainer.model,
            # Not the bound method, which is a new object at each access.
            "compute_loss": vars(trainer).get("compute_loss", type(trainer).compute_loss),
            "compute_loss_func": trainer.compute_loss_func,
            "label_smoother": trainer.label_smoother,
            **self._further(),
        }
        for name, model in self._models.items():
            found.update(_called_by(model, name or type(model).__name__))
        return found


def key_of(code: TrackedCode) -> tuple[Hashable, ...]:
    """A key that differs for different code, and for the same code after a change. Holds a reference to the code."""
    return code, code.generation


def _are_the_same(present: dict[str, Any], noted: dict[str, Any]) -> bool:
    return present.keys() == noted.keys() and all(value is noted[name] for name, value in present.items())


def _examine(trainer: Any, functions: dict[str, Any], analysis: Analysis) -> None:
    part = "forward"
    try:
        analysis.examine(trainer.model, (), {UNKNOWN: DATA})
        for part, function in functions.items():
            if part == "compute_loss":
                if overridden(trainer, (part,)) is not None:
                    # The batch is the trainer's own copy.
                    analysis.examine(trainer.compute_loss, [Value((trainer.model,))], {UNKNOWN: DATA})
            elif part in _GIVEN or part.startswith(_LOSS):
                if function is not None and not is_trusted(function):
                    analysis.examine(function, (), {UNKNOWN: DATA})
            elif part.startswith(tuple(_INTERFACES)) and function is not None and not is_trusted(function):
                # It gets modules as arguments, which are not known before the call, and may do anything with them.
                raise Unsafe(f"{getattr(function, '__qualname__', type(function).__qualname__)} is not followed")
    except Unsafe as error:
        name = overridden(trainer, (part,)) or f"the {part} of your own"
        raise Unsafe(f"{name} is not known to be safe to leave out: {error}") from None


def _called_by(model: PreTrainedModel, name: str) -> Iterator[tuple[str, Any]]:
    """The functions of a library's model that the user can replace: its loss, attention and mask, each with a name."""
    loss = getattr(model, "_loss_function", None) or LOSS_MAPPING.get(str(getattr(model, "loss_type", None)))
    yield f"{_LOSS} ({name})", loss
    chosen = getattr(model.config, "_attn_implementation", None)
    for kind, interface in _INTERFACES.items():
        yield f"{kind} ({name})", interface.get(chosen)


def overridden(trainer: Any, names: tuple[str, ...]) -> str | None:
    """The first of these methods that is user code, in a class or on the instance; None if there is none."""
    own = vars(trainer)
    for name in names:
        if name in own:
            return f"the trainer's own {name}"
        for cls in type(trainer).__mro__:
            # The user may also have replaced a method of a library's class.
            if name in vars(cls) and not (
                cls.__module__.startswith(_LIBRARIES) and _is_trusted_member(vars(cls)[name])
            ):
                return f"{cls.__name__}.{name}"
            if cls is Trainer:
                break
    return None


def _is_trusted_member(member: Any) -> bool:
    return isinstance(member, property) or is_trusted(member)
