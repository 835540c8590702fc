"""What a step's graph depends on beside its tensors, held against its present state at each replay."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch
from torch.nn.modules import module as nn_module

from xla_adapters.location import is_of_user
from xla_adapters.waiting_steps import function_modes

_SIMPLE = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device)
_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)
_GLOBAL_HOOKS = (
    "_global_backward_pre_hooks",
    "_global_backward_hooks",
    "_global_forward_pre_hooks",
    "_global_forward_hooks",
)
_ABSENT = object()


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


def is_simple(value: Any, depth: int = 3) -> bool:
    """Whether a value can be compared, and kept as a copy."""
    if type(value) in _SIMPLE or isinstance(value, (str, int, float)):
        return True
    if type(value) in (list, tuple, set, frozenset) and len(value) <= 64:
        return depth > 0 and all(is_simple(item, depth - 1) for item in value)
    if type(value) is dict and len(value) <= 256:
        return depth > 0 and all(is_simple(item, depth - 1) for item in value.values())
    return False


def _copy(value: Any) -> Any:
    if type(value) in (list, tuple, set, frozenset):
        return type(value)(_copy(item) for item in value)
    return {key: _copy(item) for key, item in value.items()} if type(value) is dict else value


def _is_noted(value: Any) -> bool:
    return isinstance(value, torch.Tensor) or callable(value) or is_simple(value)


@dataclass(frozen=True, slots=True)
class ObjectFacts:
    """The plain attributes of an object, e.g. a configuration."""

    owner: Any
    name: str
    values: dict[str, Any]

    @classmethod
    def of(cls, owner: Any, name: str) -> ObjectFacts:
        """Notes the attributes as they are."""
        return cls(owner, name, {key: _copy(value) for key, value in vars(owner).items() if is_simple(value)})

    def changed(self) -> str | None:
        """The first attribute that is not as noted, or None."""
        present = vars(self.owner)
        for key, value in self.values.items():
            if present.get(key, _ABSENT) != value:
                return f"{self.name}.{key}: {value!r:.60} -> {present.get(key)!r:.60}"
        return None


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
        self._traits = [(item, item.requires_grad, item.shape) for item in given]
        self._buffers = [(key, item) for key, item in module._buffers.items() if (id(module), key) not in rebound]
        self._children = list(module._modules.values())
        self._hooks = [(own[kind], list(own[kind])) for kind in _HOOKS if kind in own]
        self._configs = _configs(name, own, noted)
        # Tensors compare element by element: they are held as their identity.
        free = {key: value for key, value in own.items() if (id(module), key) not in rebound}
        self._tensors = [(key, value) for key, value in free.items() if isinstance(value, torch.Tensor)]
        self._values = {
            key: _copy(value)
            for key, value in free.items()
            if key not in _HOOKS and _is_noted(value) and not isinstance(value, torch.Tensor)
        }
        self._known = set(own) | {key for owner, key in rebound if owner == id(module)}
        self._size = len(own)
        self._fetch = itemgetter("training", *self._values)
        self._fetched = self._fetch({"training": module.training, **self._values})

    def changed(self) -> str | None:
        """How the module differs from what was noted, or None."""
        own = self.module.__dict__
        try:
            plain = self._fetch(own) == self._fetched
        except KeyError:
            plain = False
        if not plain:
            return self._changed_value(own)
        if len(own) != self._size:
            # A `forward` of its own, say, or what hides a default of its class.
            for key, value in own.items():
                if key not in self._known and _is_noted(value):
                    return f"{self.name} has got an attribute {key!r}"
            self._size = len(own)
        if self._parameters:
            # Identity is tried before equality, which would compare elements; the lengths come first.
            parameters = own["_parameters"].values()
            if len(parameters) != len(self._parameters):
                return f"{self.name} has other parameters"
            for present, noted in zip(parameters, self._parameters, strict=True):
                if present is not noted:
                    return f"a parameter of {self.name} was replaced"
            for parameter, requires_grad, shape in self._traits:
                if parameter.requires_grad is not requires_grad:
                    return f"requires_grad of a parameter of {self.name}: {requires_grad} -> {not requires_grad}"
                if parameter.shape != shape:
                    return f"the shape of a parameter of {self.name} changed"
        elif own["_parameters"]:
            return f"{self.name} has other parameters"
        for key, buffer in self._buffers:
            if own["_buffers"].get(key) is not buffer:
                return f"the buffer {key} of {self.name} was replaced"
        for key, tensor in self._tensors:
            if own.get(key) is not tensor:
                return f"the tensor {self.name}.{key} was replaced"
        if self._children and list(own["_modules"].values()) != self._children:
            return f"a submodule of {self.name} was replaced"
        for hooks, keys in self._hooks:
            if (hooks or keys) and list(hooks) != keys:
                return f"the hooks of {self.name} changed"
        for config in self._configs:
            change = config.changed()
            if change is not None:
                return change
        return None

    def _changed_value(self, own: dict[str, Any]) -> str:
        if own["training"] is not self._fetched[0]:
            return f"{self.name} went to {'eval' if self._fetched[0] else 'train'} mode"
        for key, value in self._values.items():
            if own.get(key, _ABSENT) != value:
                return f"{self.name}.{key}: {value!r:.60} -> {own.get(key)!r:.60}"
        return f"{self.name} changed"

    def parameters(self) -> list[torch.Tensor]:
        """Its own, as they were noted."""
        return [item for item, _, _ in self._traits]

    def tensors_held(self) -> Iterable[torch.Tensor]:
        """Its parameters, buffers and plain attributes that are tensors."""
        yield from self.parameters()
        yield from (item for item in self.module._buffers.values() if item is not None)
        yield from (item for _, item in self._tensors)

    def user_hook(self) -> str | None:
        """A hook on the module, whose Python a replay would leave out."""
        for hooks, _ in self._hooks:
            if not all(getattr(hook, "only_tensors", False) for hook in hooks.values()):
                return f"{self.name} has a hook, whose Python a replay would leave out"
        return None


@dataclass(frozen=True, slots=True)
class ReadFact:
    """Something that a step's code reads from outside.

    Attributes:
        owner: a module, class, object, dictionary or cell.
        name: of what is read there.
        value: what was found.
        said: how the code says it.
    """

    owner: Any
    name: str
    value: Any
    said: str

    @classmethod
    def of(cls, owner: Any, name: str, value: Any, said: str) -> ReadFact:
        """Notes a value, a container by what it holds."""
        return cls(owner, name, _copy(value) if is_simple(value) else value, said)

    @classmethod
    def of_contents(cls, owner: Any, contents: list[Any], said: str) -> ReadFact:
        """Notes what a container holds."""
        return cls(owner, "", contents, said)

    def changed(self) -> str | None:
        """How the code would read it differently now, or None."""
        if not self.name:
            present = list(self.owner.values() if hasattr(self.owner, "values") else self.owner)
            same = len(present) == len(self.value) and not any(map(differs, present, self.value))
            return None if same else f"{self.said} holds something else"
        owner = self.owner
        if isinstance(owner, dict):
            found = owner.get(self.name, _ABSENT)
        elif isinstance(owner, types.CellType):
            found = content_of(owner)
        else:
            found = vars(owner).get(self.name, _ABSENT)
        return f"{self.said} changed" if differs(found, self.value) else None


class FunctionFacts:
    """What a function reads from outside: its closure, the globals it names, and attributes of both that it names."""

    def __init__(self, function: Callable[..., Any]) -> None:
        owner = getattr(function, "__self__", None)
        function = getattr(function, "__func__", function)
        self._function = function
        code: types.CodeType | None = getattr(function, "__code__", None)
        self._globals = getattr(function, "__globals__", {})
        names = sorted(names_in(code)) if code is not None else ()
        self._named = {name: _copy(self._globals[name]) for name in names if name in self._globals}
        self._cells = [(cell, _copy(content_of(cell))) for cell in getattr(function, "__closure__", None) or ()]
        objects = [owner, *self._named.values(), *(value for _, value in self._cells)]
        self._attributes = [
            (item.__dict__, name, _copy(item.__dict__[name]))
            for item in objects
            if hasattr(item, "__dict__") and not isinstance(item, torch.nn.Module) and not is_of_library(item)
            for name in names
            if name in item.__dict__
        ]

    def changed(self) -> str | None:
        """What the function would read differently now, or None."""
        for name, value in self._named.items():
            if differs(self._globals.get(name, _ABSENT), value):
                return f"the global {name!r} changed"
        names = self._function.__code__.co_freevars if self._cells else ()
        for name, (cell, value) in zip(names, self._cells, strict=True):
            if differs(content_of(cell), value):
                return f"the variable {name!r} changed"
        for owner, name, value in self._attributes:
            if differs(owner.get(name, _ABSENT), value):
                return f"the attribute {name!r} changed"
        return None


def names_in(code: types.CodeType) -> set[str]:
    """The globals and attributes that code names, in functions that it defines too."""
    inner = (names_in(constant) for constant in code.co_consts if isinstance(constant, types.CodeType))
    return set(code.co_names).union(*inner)


def is_of_library(item: Any) -> bool:
    """Whether it is a module or class of one."""
    if isinstance(item, type):
        item = sys.modules.get(item.__module__)
    elif not isinstance(item, types.ModuleType):
        return False
    # A session that is typed in has no file.
    return getattr(item, "__name__", "") != "__main__" and not is_of_user(
        getattr(item, "__file__", None) or "<built in>"
    )


def content_of(cell: types.CellType) -> Any:
    """What a variable of an enclosing function holds, or something that is nothing else if it is empty."""
    try:
        return cell.cell_contents
    except ValueError:
        return _ABSENT


def differs(present: Any, noted: Any) -> bool:
    """Whether a value is another than was noted: simple ones are compared, others are to be the same object."""
    if present is noted:
        return False
    return not is_simple(noted) or not is_simple(present) or bool(present != noted)


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
