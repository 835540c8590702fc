"""The user's own code in the steps of a trainer: what it is now, and whether a replay may leave it out."""

from __future__ import annotations

import functools
import types
from collections.abc import Hashable, Iterator
from typing import Any

from transformers import PreTrainedModel, Trainer
from transformers.loss.loss_utils import LOSS_MAPPING
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from xla_adapters.location import is_of_user
from xla_adapters.replay.effects import Proof
from xla_adapters.replay.outside import OF_MODULES, Knowledge, Unproven, Value, nothing
from xla_adapters.replay.own_code import OwnCode

OWN_PACKAGES = ("transformers.", "hf_trainer.")
# Their modules compute in forward, and do nothing else that a step would miss.
_KNOWN_MODULES = ("transformers.", "torch.", "peft.", "xla_adapters.", "hf_trainer.")
_KNOWLEDGE = Knowledge(
    packages=_KNOWN_MODULES,
    calls={**OF_MODULES, Trainer.compute_loss: nothing},
    properties=dict.fromkeys(("device", "dtype"), nothing),
)
# Functions that the trainer is given.
_GIVEN = ("compute_loss_func", "preprocess_logits_for_metrics")
# Functions that a library's model is given.
_LOSS = "loss_function"
# The attention and the masks of a library's model are functions that it finds by name.
_INTERFACES = {"attention function": ALL_ATTENTION_FUNCTIONS, "attention mask": ALL_MASK_ATTENTION_FUNCTIONS}


class StepCode:
    """The user's own code in one kind of step of a trainer.

    The trainer's functions may be set anew at any time: then all is examined again, and no step that was recorded
    before counts.

    Args:
        trainer: the trainer.
        evaluates: whether the steps are those of evaluation.
    """

    def __init__(self, trainer: Any, *, evaluates: bool = False) -> None:
        self._trainer = trainer
        self._evaluates = evaluates
        # Held, so that no other function comes to have the id of one of these.
        self._functions: dict[str, Any] = {}
        self._models: dict[str, PreTrainedModel] = {}
        self._code: OwnCode | None = None

    def present(self) -> OwnCode:
        """What is known of the code as it is now."""
        functions = self._found()
        if self._code is not None and _are_the_same(functions, self._functions):
            self._code.follow()
            return self._code
        if functions["forward"] is not self._functions.get("forward"):
            modules = self._trainer.model.named_modules()
            self._models = {name: part for name, part in modules if isinstance(part, PreTrainedModel)}
            functions = self._found()
        self._functions = functions
        trusted: list[Any] | None = [] if self._trainer.xla_config.step_replay is True else None
        self._code = OwnCode(_KNOWLEDGE, functools.partial(_examine, self._trainer, functions), trusted=trusted)
        return self._code

    def _found(self) -> dict[str, Any]:
        trainer = self._trainer
        found = {
            "forward": trainer.model,
            # Not the bound method, which is another one each time it is asked for.
            "compute_loss": vars(trainer).get("compute_loss", type(trainer).compute_loss),
            "compute_loss_func": trainer.compute_loss_func,
            "label_smoother": trainer.label_smoother,
        }
        if self._evaluates:
            found["preprocess_logits_for_metrics"] = trainer._preprocess_in_step
        for name, model in self._models.items():
            found.update(_called_by(model, name or type(model).__name__))
        return found


def key_of(code: OwnCode) -> tuple[Hashable, ...]:
    """What tells steps of this code, as it is now, from those of any other; holds on to the code."""
    return code, code.generation


def _are_the_same(present: dict[str, Any], noted: dict[str, Any]) -> bool:
    return present.keys() == noted.keys() and all(value is noted[name] for name, value in present.items())


def _examine(trainer: Any, functions: dict[str, Any], proof: Proof) -> None:
    part = "forward"
    try:
        proof.examine_module(trainer.model)
        for part, function in functions.items():
            if part == "compute_loss":
                if overridden(trainer, (part,)) is not None:
                    # The batch is the trainer's own copy.
                    proof.examine(trainer.compute_loss, [Value((trainer.model,))])
            elif part in _GIVEN or part.startswith(_LOSS):
                if function is not None and (part in _GIVEN or _is_of_user(function)):
                    proof.examine(function)
            elif part.startswith(tuple(_INTERFACES)) and _is_of_user(function):
                # It is given modules that nobody knows before, and may do anything with them.
                raise Unproven(f"{getattr(function, '__qualname__', type(function).__qualname__)} is not followed")
    except Unproven as error:
        name = overridden(trainer, (part,)) or f"the {part} of your own"
        raise Unproven(
            f"a replay would leave out what {name} may do beside tensors: {error}; step_replay=True accepts that"
        ) from None


def _called_by(model: PreTrainedModel, name: str) -> Iterator[tuple[str, Any]]:
    """The functions that a library's model calls and that may be given to it, by what they are."""
    loss = getattr(model, "_loss_function", None) or LOSS_MAPPING.get(str(getattr(model, "loss_type", None)))
    yield f"{_LOSS} ({name})", loss
    chosen = getattr(model.config, "_attn_implementation", None)
    for kind, interface in _INTERFACES.items():
        yield f"{kind} ({name})", interface.get(chosen)


def _is_of_user(function: Any) -> bool:
    """Whether a function is of no library; any other object that is called is judged by its class."""
    while isinstance(function, functools.partial):
        function = function.func
    function = getattr(function, "__func__", function)
    if isinstance(function, types.FunctionType):
        return is_of_user(function.__code__.co_filename)
    builtin = function is None or isinstance(function, (types.BuiltinFunctionType, property))
    return not builtin and not type(function).__module__.startswith(_KNOWN_MODULES)


def overridden(trainer: Any, names: tuple[str, ...]) -> str | None:
    """The first of these methods that is the user's own: of a class, or of the trainer alone."""
    own = vars(trainer)
    for name in names:
        if name in own:
            return f"the trainer's own {name}"
        for cls in type(trainer).__mro__:
            # A method of a library's class may have been replaced.
            if name in vars(cls) and (not cls.__module__.startswith(OWN_PACKAGES) or _is_of_user(vars(cls)[name])):
                return f"{cls.__name__}.{name}"
            if cls is Trainer:
                break
    return None
