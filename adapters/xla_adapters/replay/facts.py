"""What a step's graph depends on beside its tensors, held against its present state at each replay."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch
from torch.nn.modules import module as nn_module

from xla_adapters.replay.glance import Glance
from xla_adapters.replay.sources import is_own_code
from xla_adapters.replay.tensor_facts import TensorFacts, hooks_of
from xla_adapters.replay.values import ABSENT, copied, differs, is_noted, is_simple
from xla_adapters.waiting_steps import function_mode_stack, function_modes

_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)
_PARTS = ("_parameters", "_buffers", "_modules")
_GLOBAL_HOOKS = (
    "_global_backward_pre_hooks",
    "_global_backward_hooks",
    "_global_forward_pre_hooks",
    "_global_forward_hooks",
)


# What every module has: what of it counts is looked at by itself.
_OF_TORCH = frozenset(vars(torch.nn.Module()))


def environment() -> tuple[Any, ...]:
    """The process-wide switches that shape a trace."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("xla"),
        torch.get_autocast_dtype("xla"),
        torch.get_default_dtype(),
        torch.is_anomaly_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        function_modes(),
        tuple(key for name in _GLOBAL_HOOKS for key in getattr(nn_module, name)),
    )


def own_mode() -> str | None:
    """A mode of the user's own, which sees each function of torch that is called; None if none is on."""
    for mode in function_mode_stack():
        if is_own_code(type(mode).__torch_function__):
            return f"{type(mode).__qualname__} is on, which sees each operator of a traced step"
    return None


@dataclass(frozen=True, slots=True)
class ObjectFacts:
    """The plain attributes of an object, e.g. a configuration."""

    owner: Any
    name: str
    values: dict[str, Any]

    @classmethod
    def of(cls, owner: Any, name: str) -> ObjectFacts:
        """Notes the attributes as they are."""
        return cls(owner, name, {key: copied(value) for key, value in vars(owner).items() if is_simple(value)})

    def changed(self) -> str | None:
        """The first attribute that is not as noted, or None."""
        return _changed_value(self.name, vars(self.owner), self.values)

    def show(self, glance: Glance) -> None:
        """Hands it the attributes."""
        glance.attributes(vars(self.owner), tuple(self.values))


class ModuleFacts:
    """What a trace depends on in one module: mode, hooks, which tensors it holds, plain attributes.

    Args:
        name: of the module, for messages.
        module: the module, as it is now.
        noted: configurations that are noted already; the module's are added.
        rebound: buffers and attributes (module, name) that the step itself binds anew.
    """

    def __init__(self, name: str, module: torch.nn.Module, noted: set[int], rebound: set[tuple[int, str]]) -> None:
        own = vars(module)
        self.name = name
        self.module = module
        self._parameters = list(module._parameters.values())
        given = [item for item in self._parameters if item is not None]
        self._traits = [TensorFacts.of(item) for item in given]
        self._buffers = [(key, item) for key, item in module._buffers.items() if (id(module), key) not in rebound]
        self._buffer_traits = [TensorFacts.of(item) for _, item in self._buffers if item is not None]
        self._children = list(module._modules.values())
        self._hooks = [(own[kind], list(own[kind])) for kind in _HOOKS if kind in own]
        self._configs = _configs(name, own, noted)
        # Tensors compare element by element: they are held as their identity.
        free = {key: value for key, value in own.items() if (id(module), key) not in rebound}
        self._tensors = [(key, value) for key, value in free.items() if isinstance(value, torch.Tensor)]
        self._training = module.training
        self._values = {
            key: copied(value)
            for key, value in free.items()
            if key not in _OF_TORCH and is_noted(value) and not isinstance(value, torch.Tensor)
        }
        self._known = set(own) | {key for owner, key in rebound if owner == id(module)}

    def show(self, glance: Glance) -> None:
        """Hands it all that `changed` looks at, and what that is found in."""
        own = vars(self.module)
        glance.attributes(own, [*_PARTS, "training", *self._values, *(key for key, _ in self._tensors)])
        glance.size(own)
        glance.contents(own["_parameters"])
        glance.contents(own["_modules"])
        if len(self._buffers) == len(own["_buffers"]):
            glance.contents(own["_buffers"])
        else:
            glance.attributes(own["_buffers"], [key for key, _ in self._buffers])
        glance.tensors(traits.tensor for traits in (*self._traits, *self._buffer_traits))
        for hooks, _ in self._hooks:
            glance.contents(hooks)
        for config in self._configs:
            config.show(glance)

    def changed(self) -> str | None:
        """How the module differs from what was noted, or None."""
        own = self.module.__dict__
        if own["training"] is not self._training:
            return f"{self.name} went to {'eval' if self._training else 'train'} mode"
        change = _changed_value(self.name, own, self._values)
        if change is not None:
            return change
        # A `forward` of its own, say, or what hides a default of its class.
        for key, value in own.items():
            if key not in self._known and is_noted(value):
                return f"{self.name} has got an attribute {key!r}"
        if not _are(own["_parameters"].values(), self._parameters):
            return f"a parameter of {self.name} was replaced"
        for key, buffer in self._buffers:
            if own["_buffers"].get(key) is not buffer:
                return f"the buffer {key} of {self.name} was replaced"
        for kind, group in (("parameter", self._traits), ("buffer", self._buffer_traits)):
            for traits in group:
                change = traits.changed()
                if change is not None:
                    return f"{change} of a {kind} of {self.name} changed"
        for key, tensor in self._tensors:
            if own.get(key) is not tensor:
                return f"the tensor {self.name}.{key} was replaced"
        if not _are(own["_modules"].values(), self._children):
            return f"a submodule of {self.name} was replaced"
        for hooks, keys in self._hooks:
            if list(hooks) != keys:
                return f"the hooks of {self.name} changed"
        return next((change for config in self._configs if (change := config.changed())), None)

    def parameters(self) -> list[torch.Tensor]:
        """Its own, as they were noted."""
        return [traits.tensor for traits in self._traits]

    def tensors_held(self) -> Iterable[torch.Tensor]:
        """Its parameters, buffers and plain attributes that are tensors."""
        yield from self.parameters()
        yield from (item for item in self.module._buffers.values() if item is not None)
        yield from (item for _, item in self._tensors)

    def user_hook(self) -> str | None:
        """A hook on the module, its parameters or all modules, whose Python a replay would leave out."""
        for hooks, _ in self._hooks:
            if not _only_tensors(hooks):
                return f"{self.name} has a hook, whose Python a replay would leave out"
        if not all(_only_tensors(hooks) for traits in self._traits for hooks in hooks_of(traits.tensor)):
            return f"a parameter of {self.name} has a hook, whose Python a replay would leave out"
        if any(is_own_code(hook) for name in _GLOBAL_HOOKS for hook in getattr(nn_module, name).values()):
            return "there is a hook on all modules, whose Python a replay would leave out"
        return None


def _changed_value(name: str, own: Mapping[str, Any], noted: Mapping[str, Any]) -> str | None:
    for key, value in noted.items():
        present = own.get(key, ABSENT)
        if differs(present, value):
            return f"{name}.{key}: {_said(value)} -> {_said(present)}"
    return None


def _said(value: Any) -> str:
    if value is ABSENT:
        return "nothing"
    # The text of a tensor is a transfer from the device; that of other objects is their own code.
    return f"{value!r:.60}" if is_simple(value) else f"a {type(value).__name__}"


def _are(present: Collection[object], noted: Collection[object]) -> bool:
    return len(present) == len(noted) and all(map(is_, present, noted))


def _configs(name: str, own: dict[str, Any], noted: set[int]) -> list[ObjectFacts]:
    found = []
    for key, value in own.items():
        if key.endswith("config") and hasattr(value, "__dict__") and id(value) not in noted:
            noted.add(id(value))
            found.append(ObjectFacts.of(value, f"{name}.{key}"))
    return found


def all_related(module: torch.nn.Module) -> Collection[str]:
    """No attribute of the module can be left out of the facts."""
    return ()


def facts_of(
    roots: Iterable[torch.nn.Module],
    rebound: set[tuple[int, str]],
    unrelated: Callable[[torch.nn.Module], Collection[str]],
) -> list[ModuleFacts]:
    """The facts of modules and all below them, each once.

    Args:
        roots: the modules.
        rebound: buffers and attributes (module, name) that the step itself binds anew.
        unrelated: of a module, the attributes that no graph depends on, or that are noted elsewhere.
    """
    seen: set[int] = set()
    noted: set[int] = set()
    found: list[ModuleFacts] = []
    for root in roots:
        for name, module in root.named_modules():
            if id(module) not in seen:
                seen.add(id(module))
                ours = rebound | {(id(module), key) for key in unrelated(module)}
                found.append(ModuleFacts(name or type(module).__name__, module, noted, ours))
    return found


def _only_tensors(hooks: Mapping[int, Any]) -> bool:
    return all(getattr(hook, "only_tensors", False) for hook in hooks.values())
