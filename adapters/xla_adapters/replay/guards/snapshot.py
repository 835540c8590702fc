"""`ModuleSnapshot`: the attributes of modules when a step was traced, to find out later what has changed.

Trusted modules compute from their attributes. So all attributes must be of a kind that can be compared: constants,
tensors, modules, Python's own containers, functions and objects of trusted packages. With any other attribute the step
is traced.
"""

from __future__ import annotations

import functools
import inspect
import pathlib
import re
import sys
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping
from operator import attrgetter, eq
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from xla_adapters.replay.guards.containers import ContainerEntries, EntriesCheck, Slots, said
from xla_adapters.replay.safety.guards import content_of
from xla_adapters.replay.safety.trusted import (
    is_installed_file,
    is_trusted,
    is_users_alone,
    is_users_class,
    is_users_file,
)
from xla_adapters.utils.nested_values import ABSENT, is_constant, is_plain_enum, is_simple, same_bits
from xla_adapters.utils.torch_modes import unused_in_steps

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# Hooks of libraries that were read: a trace has all that they do. By module and by the name of their code.
_OF_LIBRARIES = {
    # Has the embeddings require gradients, for activation checkpointing and for adapters.
    ("transformers.modeling_utils", "PreTrainedModel.enable_input_require_grads.<locals>.make_inputs_require_grads"),
    # Adds an output to a list that the model's forward makes and returns.
    ("transformers.utils.output_capturing", "install_output_capuring_hook.<locals>.output_capturing_hook"),
}
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
# Attributes of every module that do not change a step.
_IDLE = frozenset(_OF_EVERY_MODULE - {"training", "_parameters", "_buffers", "_modules", *_HOOKS})
_MAPPINGS = (dict, OrderedDict, defaultdict)
_SEQUENCES = (list, tuple, deque)
# Objects that never change, or that do not change what a module computes.
_FIXED = (inspect.Signature, re.Pattern, pathlib.PurePath, types.ModuleType, property, RemovableHandle)
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType)
_METHODS = frozenset(vars(nn.Module))
_HOST_NUMBERS = 1024
_traits = attrgetter("requires_grad", "dtype", "shape", "_backward_hooks", "_post_accumulate_grad_hooks")

Exempt = Callable[[nn.Module], Collection[str]]


class ModuleSnapshot:
    """The attributes of modules at one time.

    A model of twelve layers has some thousand attributes. They are compared by identity first, which is fast. Only if
    an attribute is another object, values are compared.

    Args:
        roots: the modules; their submodules are included.
        reassigned: buffers and attributes, by `id` of the owner and name, that the step itself sets.
        exempt: returns the names of a module's attributes that no graph depends on, or that are guarded elsewhere.
        strict: whether an attribute that cannot be compared is a reason to trace.

    Attributes:
        reason: what cannot be compared, in words; None if nothing.
        modules: all modules, with their names.
        tensors: all tensors on the device that are attributes.
    """

    def __init__(
        self, roots: Iterable[nn.Module], *, reassigned: set[tuple[int, str]], exempt: Exempt, strict: bool = True
    ) -> None:
        self._roots = list(roots)
        self._reassigned = reassigned
        self._exempt = exempt
        self._strict = strict
        self._loose: list[torch.Tensor] = []
        self._take()

    def _take(self) -> None:
        self.reason: str | None = None
        self.modules: list[tuple[str, nn.Module]] = []
        self.tensors: list[torch.Tensor] = []
        # Objects that were visited, by `id`. They are referenced, so that no other object gets their `id`.
        self._seen: dict[int, Any] = {}
        self._entries: list[ContainerEntries] = []
        self._sets: list[tuple[Any, Any, str]] = []
        self._hosts: list[tuple[torch.Tensor, torch.Tensor, str]] = []
        self._owned: list[tuple[torch.Tensor, str]] = []
        self._classes: set[type] = set()
        self._lenient: list[tuple[dict[str, Any], str, frozenset[str]]] = []
        for root in self._roots:
            for name, module in root.named_modules():
                self._module(module, name or type(module).__name__)
        for tensor in self._loose:
            self._value(tensor, "a tensor that is in no module")
        # Functions that trainers and models call from these namespaces may be replaced.
        for namespace in (torch, torch.autograd, nn.functional, nn.utils):
            self._code(vars(namespace), namespace.__name__)
        for cls in (torch.Tensor, nn.Parameter):
            # All entries, not only functions: code may read them from any tensor.
            self._code(vars(cls), cls.__qualname__, ContainerEntries.all_of(vars(cls), cls.__qualname__))
        self._kinds = [(module, type(module), vars(module), name) for name, module in self.modules]
        self._note_traits()

    def _note_traits(self) -> None:
        self._tensors = [tensor for tensor, _ in self._owned]
        self._traits = list(map(_traits, self._tensors))
        self._sizes = list(map(len, map(vars, self._tensors)))
        self._check = EntriesCheck(self._entries)

    # ---- taking the snapshot -----------------------------------------------------------------------

    def _refuse(self, what: str) -> None:
        if self._strict:
            self.reason = self.reason or what

    def _is_new(self, item: Any) -> bool:
        return id(item) not in self._seen and self._seen.setdefault(id(item), item) is item

    def _module(self, module: nn.Module, name: str) -> None:
        if not self._is_new(module):
            return
        own = vars(module)
        self.modules.append((name, module))
        skipped = _IDLE | {key for key in own if (id(module), key) in self._reassigned} | set(self._exempt(module))
        unused = unused_in_steps(module)
        # The analysis of a user's class has already guarded the attributes that its code reads.
        lenient = self._strict and is_users_alone(type(module))
        known = _OF_EVERY_MODULE if lenient else own
        names = tuple(key for key in own if key in known and key not in skipped)
        self._entries.append(ContainerEntries(own, name, names, None if lenient else len(own)))
        if lenient:
            self._lenient.append((own, name, _METHODS - own.keys()))
        self._class(type(module))
        for key in names:
            if key in _HOOKS:
                self._hooks(own[key], name)
            elif key == "_buffers":
                kept = tuple(buffer for buffer in own[key] if (id(module), buffer) not in self._reassigned)
                self._entries.append(ContainerEntries(own[key], f"{name}._buffers", kept, len(own[key]), ordered=True))
                for buffer in kept:
                    self._value(own[key][buffer], f"{name}.{buffer}", lenient)
            elif key == "_modules":
                # `named_modules` visits them.
                self._entries.append(ContainerEntries.all_of(own[key], f"{name}._modules"))
            elif key not in unused:
                self._value(own[key], f"{name}.{key}", lenient)

    def _hooks(self, hooks: dict[int, Any], name: str) -> None:
        self._entries.append(ContainerEntries.all_of(hooks, name))
        if not all(map(computes_only, hooks.values())):
            self._refuse(f"{name} has a hook, whose Python a replay would leave out")

    def _value(self, value: Any, path: str, lenient: bool = False, depth: int = 8) -> None:
        if is_constant(value) or is_plain_enum(value):
            return
        if isinstance(value, torch.Tensor):
            self._tensor(value, path)
        elif isinstance(value, nn.Module):
            for name, module in value.named_modules():
                self._module(module, f"{path}.{name}" if name else path)
        elif not depth:
            self._refuse(f"{path} nests too deeply to be compared")
        elif not self._is_new(value) or not (self._strict or is_simple(value) or callable(value)):
            # Without `strict`, only plain values are compared.
            return
        elif type(value) in _MAPPINGS:
            self._mapping(value, path, lenient, depth)
        elif isinstance(value, str) and is_trusted(type(value)):
            # It never changes, as a plain one.
            return
        elif type(value) in _SEQUENCES or (isinstance(value, tuple) and is_trusted(type(value))):
            self._entries.append(ContainerEntries(value, path, None, len(value)))
            for item in value:
                self._value(item, path, lenient, depth - 1)
        elif type(value) in (set, frozenset) and all(map(is_constant, value)):
            self._sets.append((value, frozenset(value), path))
        elif isinstance(value, functools.partial):
            self._value((value.func, value.args, value.keywords), path, lenient, depth - 1)
        elif isinstance(value, types.MethodType):
            self._value((value.__func__, value.__self__), path, lenient, depth - 1)
        elif isinstance(value, (*_FUNCTIONS, type)):
            self._function(value, path, lenient, depth)
        elif isinstance(value, _FIXED) or _is_for_people(type(value)) or lenient:
            return
        elif is_trusted(type(value)) and (hasattr(value, "__dict__") or _has_only_slots(type(value))):
            # A configuration of a library.
            if slots := Slots(value):
                self._entries.append(ContainerEntries(slots, path, tuple(slots), None))
                for name, item in slots.items():
                    if item is not ABSENT:
                        self._value(item, f"{path}.{name}", lenient, depth - 1)
            if hasattr(value, "__dict__"):
                self._mapping(vars(value), path, lenient, depth)
        else:
            self._refuse(f"{path} is a {type(value).__name__}, which cannot be compared")

    def _mapping(self, value: dict[Any, Any], path: str, lenient: bool, depth: int) -> None:
        if not all(is_constant(key) or is_plain_enum(key) or isinstance(key, type) for key in value):
            if not lenient:
                self._refuse(f"{path} has keys that cannot be compared")
            return
        self._entries.append(ContainerEntries.all_of(value, path))
        for key, item in value.items():
            self._value(item, f"{path}.{key}", lenient, depth - 1)

    def _function(self, value: Any, path: str, lenient: bool, depth: int) -> None:
        is_own = is_users_class(value) if isinstance(value, type) else not is_trusted(value)
        if is_own and not lenient:
            self._refuse(f"{path} is {getattr(value, '__qualname__', value)}, code of your own in a library's module")
        for cell in getattr(value, "__closure__", None) or ():
            if isinstance(content_of(cell), (types.FunctionType, types.MethodType)):
                self._value(content_of(cell), path, lenient, depth - 1)

    def _tensor(self, tensor: torch.Tensor, path: str) -> None:
        if not self._is_new(tensor):
            return
        if tensor.device.type != "cpu":
            self.tensors.append(tensor)
            self.note_tensor(tensor, path)
        elif tensor.numel() > _HOST_NUMBERS:
            self._refuse(f"{path} is a tensor on the host, of {tensor.numel()} numbers")
        else:
            self._hosts.append((tensor, tensor.detach().clone(), path))

    def note_tensor(self, tensor: torch.Tensor, path: str) -> None:
        """Adds a tensor's `requires_grad`, shape, hooks and Python attributes to the snapshot."""
        self._owned.append((tensor, path))
        attributes = vars(tensor)
        if attributes:
            self._value(attributes, f"{path}'s attributes")
        for hooks in _traits(tensor)[-2:]:
            if hooks is None:
                continue
            # Even if it is empty: a hook that is registered later is added to the same dictionary.
            self._entries.append(ContainerEntries.all_of(hooks, path))
            if not all(getattr(hook, "only_tensors", False) for hook in hooks.values()):
                self._refuse(f"{path} has a hook, whose Python a replay would leave out")

    def add(self, tensor: torch.Tensor) -> None:
        """Adds a tensor that is in no module."""
        self._loose.append(tensor)
        self._value(tensor, "a tensor that is in no module")
        self._note_traits()

    def _class(self, cls: type) -> None:
        """Adds the methods of trusted classes, and the functions of the Python modules that define them."""
        for base in cls.__mro__:
            if base in self._classes or base is object or not is_trusted(base):
                continue
            self._classes.add(base)
            functions = _functions(vars(base))
            # With the number of entries: a name that is added may hide a base class's.
            self._code(
                vars(base),
                base.__qualname__,
                ContainerEntries(vars(base), base.__qualname__, functions, len(vars(base))),
            )
            module = sys.modules[base.__module__]
            if self._is_new(vars(module)):
                self._code(vars(module), module.__name__)

    def _code(self, names: Mapping[str, Any], path: str, part: ContainerEntries | None = None) -> None:
        """Adds the functions of a trusted namespace, and those in its registries (dictionaries of functions).

        Args:
            names: the namespace.
            path: its name for messages.
            part: what to compare of it, if more than the functions.
        """
        functions = _functions(names)
        for name in functions:
            self._check_origin(names[name], f"{path}.{name}")
        self._entries.append(ContainerEntries(names, path, functions, None) if part is None else part)
        for name, item in names.items():
            is_registry = isinstance(item, MutableMapping) and (type(item) is dict or is_trusted(type(item)))
            if is_registry and not name.startswith("__") and self._is_new(item):
                within = [item] if type(item) is dict else [*vars(item).values(), *vars(type(item)).values()]
                for entries in within:
                    if type(entries) is dict and any(
                        isinstance(entry, types.FunctionType) for entry in entries.values()
                    ):
                        self._registry(entries, f"{path}.{name}")

    def _registry(self, entries: dict[Any, Any], path: str) -> None:
        self._entries.append(ContainerEntries.all_of(entries, path))
        for key, entry in entries.items():
            if isinstance(entry, types.FunctionType):
                self._check_origin(entry, f"{path}[{key!r}]")
                if self._is_new(entry.__globals__):
                    self._code(entry.__globals__, entry.__module__)

    def _check_origin(self, function: Any, path: str) -> None:
        file = function.__code__.co_filename if isinstance(function, types.FunctionType) else "<built in>"
        if is_users_file(file) and not is_installed_file(file):
            self._refuse(f"{path} is {function.__qualname__}, a function of your own in the place of a library's")

    # ---- comparing ---------------------------------------------------------------------------------

    def changed(self) -> str | None:
        """What has changed since the snapshot, in words; None if nothing."""
        if not self._is_touched():
            return None
        change = self._difference()
        if change is None:
            # Other objects with equal values: from now on these are compared.
            self._take()
        return change or self.reason

    def changed_until(self, later: ModuleSnapshot) -> str | None:
        """As `changed`; or that a later call, of which the other snapshot is, has called other modules."""
        if len(later.modules) != len(self.modules):
            return "other modules were called than in the call before"
        return self.changed()

    def changed_in_modes(self, set_modes: Callable[[], object] | None) -> str | None:
        """As `changed`, after `set_modes` where the train or eval mode of modules may be all that differs."""
        change = self.changed()
        if change is not None and set_modes is not None:
            set_modes()
            change = self.changed()
        return change

    def _is_touched(self) -> bool:
        try:
            return (
                not self._check.holds()
                or any(type(item) is not cls or vars(item) is not own for item, cls, own, _ in self._kinds)
                or not all(map(eq, map(_traits, self._tensors), self._traits))
                or not all(map(eq, map(len, map(vars, self._tensors)), self._sizes))
                or not all(hiding.isdisjoint(own) for own, _, hiding in self._lenient)
                or any(item != noted for item, noted, _ in self._sets)
                or any(_differs_on_host(tensor, noted) for tensor, noted, _ in self._hosts)
            )
        except KeyError:
            return True

    def _difference(self) -> str | None:
        for part in self._entries:
            if (change := part.difference()) is not None:
                return change
        for item, cls, own, path in self._kinds:
            if type(item) is not cls or vars(item) is not own:
                return f"{path} became a {type(item).__name__}, or got other attributes"
        for (tensor, path), noted, size in zip(self._owned, self._traits, self._sizes, strict=True):
            if _traits(tensor) != noted or len(vars(tensor)) != size:
                return _changed_trait(tensor, path, noted)
        for names, path, hiding in self._lenient:
            if not hiding.isdisjoint(names):
                return f"{path} has got {min(hiding & names.keys())!r}, which hides a method of every module"
        for item, noted_items, path in self._sets:
            if item != noted_items:
                return f"{path} holds something else"
        return next((f"{path} changed" for tensor, noted, path in self._hosts if _differs_on_host(tensor, noted)), None)


def _changed_trait(tensor: torch.Tensor, path: str, noted: tuple[Any, ...]) -> str:
    if tensor.requires_grad is not noted[0]:
        return f"requires_grad of {path}: {said(noted[0])} -> {said(tensor.requires_grad)}"
    if (tensor.dtype, tensor.shape) != noted[1:3]:
        return f"the shape or dtype of {path} changed"
    return f"a hook or an attribute of {path} changed"


def _is_for_people(cls: type) -> bool:
    """Whether no forward computes with it: annotations of types, tokenizers (it gets numbers), texts on a model."""
    return cls.__module__ in ("typing", "tokenizers") or (cls.__name__.endswith("ModelCardData") and is_trusted(cls))


def _functions(names: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(name for name, item in names.items() if isinstance(item, _FUNCTIONS))


def _has_only_slots(cls: type) -> bool:
    """Whether all that an object of a class holds is in `__slots__`. Classes written in C hold what nobody sees."""
    return all("__slots__" in vars(base) for base in cls.__mro__[:-1])


def _differs_on_host(tensor: torch.Tensor, noted: torch.Tensor) -> bool:
    return tensor.shape != noted.shape or not same_bits(tensor.detach(), noted)


def computes_only(hook: object) -> bool:
    """Whether a hook is marked as such by this project, or one of a library that is known to be such."""
    if getattr(hook, "only_tensors", False):
        return True
    if not isinstance(hook, types.FunctionType):
        return False
    module = sys.modules.get(hook.__module__)
    # The name of the code: decorators copy that of the function.
    known = (hook.__module__, hook.__code__.co_qualname) in _OF_LIBRARIES
    return known and module is not None and hook.__globals__ is vars(module)
