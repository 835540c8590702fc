"""Finds everything that a step may reach: closures, globals, defaults, objects and their classes, modules, tensors."""

from __future__ import annotations

import collections
import enum
import functools
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import torch
from torch import nn

from tests.replay.reachable import ambient
from tests.replay.reachable.mutations import CONTAINERS, NUMBERS, in_place, other_member, replacements
from tests.replay.reachable.program import USER_MODULES

# Where something is, what it is, and what puts something else there.
_Part = tuple[str, Any, "Callable[[Any], object] | None"]
Change = Callable[[], "Callable[[], object] | object"]
_DEEPEST = 9
# What Python and `dataclasses` put into a class; methods that make an object, or its text for a person.
_MADE = (
    "__init__ __new__ __post_init__ __repr__ __init_subclass__ __set_name__ __module__ __doc__ __dict__ __weakref__ "
    "__annotations__ __qualname__ __slots__ __match_args__ __dataclass_fields__ __dataclass_params__ __hash__ "
    "__abstractmethods__ _abc_impl __orig_bases__ __parameters__ __class_getitem__ __getnewargs__ __dir__ "
    "__static_attributes__ __firstlineno__ _fields _field_defaults _make _asdict _replace __reduce_ex__ __replace__ "
    "__annotate_func__ _member_map_ _member_names_ _member_type_ _value2member_map_ _unhashable_values_ _new_member_ "
    "_generate_next_value_ _use_args_ _value_repr_"
)
_OF_CLASSES = frozenset(_MADE.split())


@dataclass
class Leaf:
    """A place that can be changed.

    Attributes:
        path: where it is, from the step or what else the loop holds.
        changes: by what is done; each may return a function that takes it back.
        common: whether nearly every program has such a place: a parameter, a torch optimizer's option, a mode.
    """

    path: str
    changes: dict[str, Change] = field(default_factory=dict)
    common: bool = False


class Walker:
    """Visits what the given objects reach, of the user's things.

    Code of libraries is not looked into; of their modules, optimizers and schedules the public attributes are.
    """

    def __init__(self) -> None:
        self.leaves: dict[str, Leaf] = {}
        self.codes: list[types.CodeType] = []
        self._seen: set[int] = set()
        # Objects that are made on the way must not be taken for others that get their address.
        self._kept: list[Any] = []
        self._classes: set[type] = set()
        self._common: set[str] = set()
        self._of_frameworks = {*vars(nn.Module()), *vars(L.LightningModule()), *vars(torch.optim.SGD([torch.ones(1)]))}

    def walk(self, roots: Mapping[str, Any]) -> list[Leaf]:
        """All leaves below the roots, and the process-wide ones."""
        for name, root in roots.items():
            self.visit(root, name, None, 0)
        for path, name, change in ambient.changes(self.codes):
            self._add(path, name, change)
            if not path.startswith("os.environ"):
                self._common.add(path)
        for leaf in self.leaves.values():
            leaf.common = leaf.path in self._common
        return list(self.leaves.values())

    def _add(self, path: str, name: str, change: Change) -> None:
        self.leaves.setdefault(path, Leaf(path)).changes.setdefault(name, change)

    def visit(self, value: Any, path: str, put: Callable[[Any], object] | None, depth: int) -> None:
        """Notes how a value and its place can be changed, and looks into it.

        Args:
            value, path: what, and where.
            put: puts another one into the place; None for a root.
            depth: how far below the roots it is.
        """
        if isinstance(value, (nn.Parameter, nn.Module, torch.optim.Optimizer)) and not is_user(type(value)):
            self._common.add(path)
        if put is not None:
            for name, make in replacements(value):
                self._add(path, name, functools.partial(_put_made, put, make))
        if isinstance(value, NUMBERS):
            if is_user(type(value)):
                self._class(type(value), f"type({path})", depth + 1)
            return
        if id(value) in self._seen or depth > _DEEPEST:
            return
        self._seen.add(id(value))
        self._kept.append(value)
        for name, change in in_place(value):
            self._add(path, name, functools.partial(_done, change))
        parts = list(self._parts(value, path, put))
        if isinstance(value, (nn.Module, torch.optim.Optimizer)) and not is_user(type(value)):
            kinds = (nn.Module, torch.Tensor)
            self._common.update(place for place, item, _ in parts if not isinstance(item, kinds))
        for place, item, setter in parts:
            self.visit(item, place, setter, depth + 1)
        if isinstance(value, type):
            self._class(value, path, depth)
        elif is_user(type(value)):
            self._class(type(value), f"type({path})", depth + 1)

    def _parts(self, value: Any, path: str, put: Any) -> Iterator[_Part]:
        """What a value holds: path, item and what replaces the item."""
        if isinstance(value, types.FunctionType):
            yield from self._of_function(value, path)
        elif isinstance(value, types.MethodType):
            yield f"{path}.__self__", value.__self__, None
            yield f"{path}.__func__", value.__func__, None
        elif isinstance(value, functools.partial):
            yield f"{path}.func", value.func, None
            yield from _of_container(value.keywords, f"{path}.keywords", None)
            yield from ((f"{path}.args[{number}]", item, None) for number, item in enumerate(value.args))
        elif isinstance(value, nn.Module):
            yield from self._of_module(value, path)
        elif isinstance(value, torch.Tensor):
            yield from _of_mapping(vars(value), path)
        elif isinstance(value, torch.optim.Optimizer):
            yield from self._of_optimizer(value, path)
        elif isinstance(value, CONTAINERS):
            yield from _of_container(value, path, put)
            if is_user(type(value)) and hasattr(value, "__dict__"):
                yield from _of_mapping(vars(value), path)
        elif isinstance(value, torch.optim.lr_scheduler.LRScheduler):
            yield from (
                (place, item, setter) for place, item, setter in _of_mapping(vars(value), path) if "._" not in place
            )
        elif isinstance(value, (types.ModuleType, type)):
            return
        elif is_user(type(value)) or isinstance(value, types.SimpleNamespace):
            yield from self._of_object(value, path)

    def _of_function(self, function: types.FunctionType, path: str) -> Iterator[_Part]:
        code = function.__code__
        if not is_user_function(function):
            # A decorator of a library's takes over the name of what it wraps.
            if isinstance(getattr(function, "__wrapped__", None), types.FunctionType):
                yield f"{path}.__wrapped__", function.__wrapped__, None  # type: ignore[attr-defined]
            return
        codes = [code]
        for one in codes:
            codes.extend(constant for constant in one.co_consts if isinstance(constant, types.CodeType))
        self.codes += codes
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            try:
                yield f"{path}.<{name}>", cell.cell_contents, functools.partial(setattr, cell, "cell_contents")
            except ValueError:
                continue
        names = dict.fromkeys(name for one in codes for name in one.co_names)
        for name in names:
            if name in function.__globals__:
                item = function.__globals__[name]
                yield from _global(function.__globals__, name, item, names)
        for number, item in enumerate(function.__defaults__ or ()):
            yield f"{path}.__defaults__[{number}]", item, functools.partial(_put_default, function, number)
        if function.__kwdefaults__:
            yield from _of_mapping(function.__kwdefaults__, f"{path}.__kwdefaults__")
        yield from _of_mapping(vars(function), path)

    def _of_module(self, module: nn.Module, path: str) -> Iterator[_Part]:
        self._common.add(f"{path}.training")
        yield f"{path}.training", module.training, functools.partial(setattr, module, "training")
        for group in (module._parameters, module._buffers, module._modules):
            for name, item in group.items():
                if item is not None:
                    yield f"{path}.{name}", item, functools.partial(group.__setitem__, name)
        for name, item in vars(module).items():
            if name not in self._of_frameworks and name != "config" and not isinstance(item, torch.nn.Module):
                yield f"{path}.{name}", item, functools.partial(vars(module).__setitem__, name)
        for kind in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks"):
            for number, hook in enumerate(getattr(module, kind, {}).values()):
                yield f"{path}.{kind}[{number}]", hook, None

    def _of_optimizer(self, optimizer: torch.optim.Optimizer, path: str) -> Iterator[_Part]:
        for number, group in enumerate(optimizer.param_groups):
            place = f"{path}.param_groups[{number}]"
            for name, item in group.items():
                if name != "params":
                    yield f"{place}[{name!r}]", item, functools.partial(group.__setitem__, name)
            for index, parameter in enumerate(group["params"]):
                for name, item in optimizer.state.get(parameter, {}).items():
                    setter = functools.partial(optimizer.state[parameter].__setitem__, name)
                    place = f"{path}.state[{number}, {index}][{name!r}]"
                    self._common.add(place)
                    yield place, item, setter
        for name, item in vars(optimizer).items():
            if is_user(type(optimizer)) and name not in self._of_frameworks and not name.startswith("_"):
                yield f"{path}.{name}", item, functools.partial(setattr, optimizer, name)

    def _of_object(self, value: Any, path: str) -> Iterator[_Part]:
        named = None
        if any(not is_user(base) and base is not object and hasattr(base, "train") for base in type(value).__mro__):
            # A trainer: of what the framework keeps in it, only what the user's code names.
            named = {name for cls in type(value).__mro__ if is_user(cls) for name in _names_in(cls)}
        for name, item in vars(value).items() if hasattr(value, "__dict__") else ():
            if not isinstance(value, enum.Enum) and (named is None or name in named):
                yield f"{path}.{name}", item, functools.partial(vars(value).__setitem__, name)
        for cls in type(value).__mro__:
            slots = vars(cls).get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                if hasattr(value, name) and name not in ("__dict__", "__weakref__"):
                    yield f"{path}.{name}", getattr(value, name), functools.partial(object.__setattr__, value, name)

    def _class(self, cls: type, path: str, depth: int) -> None:
        for base in cls.__mro__:
            if not is_user(base) or base in self._classes:
                continue
            self._classes.add(base)
            for name, member in list(vars(base).items()):
                if name in _OF_CLASSES or (isinstance(member, enum.Enum) and issubclass(base, enum.Enum)):
                    continue
                place = f"{base.__name__}.{name}"
                put = functools.partial(type.__setattr__, base, name)
                for change, make in other_member(member):
                    self._add(place, change, functools.partial(_put_made, put, make))
                for part in _functions_of(member):
                    self.visit(part, place, None, depth + 1)
        if is_user(type(cls)):
            self._class(type(cls), f"type({path})", depth + 1)


def _put_made(put: Callable[[Any], object], make: Callable[[], Any]) -> None:
    put(make())


def _done(change: Callable[[], object]) -> None:
    change()


def is_user(cls: type) -> bool:
    """Whether a class is the user's own, or a helper's."""
    return (getattr(cls, "__module__", None) or "").startswith(USER_MODULES)


def is_user_function(function: types.FunctionType) -> bool:
    """Whether a function is the user's own, or a helper's."""
    return str(function.__globals__.get("__name__")).startswith(USER_MODULES)


def _names_in(cls: type) -> Iterator[str]:
    for member in vars(cls).values():
        for function in _functions_of(member):
            if isinstance(function, types.FunctionType):
                yield from function.__code__.co_names


def _functions_of(member: Any) -> Iterator[Any]:
    if isinstance(member, property):
        yield from (part for part in (member.fget, member.fset) if part is not None)
    elif isinstance(member, functools.cached_property):
        yield member.func
    elif isinstance(member, (staticmethod, classmethod)):
        yield member.__func__
    elif not isinstance(member, (types.MemberDescriptorType, types.GetSetDescriptorType)):
        yield member


def _global(namespace: dict[str, Any], name: str, item: Any, names: Iterable[str]) -> Iterator[_Part]:
    where = namespace["__name__"].rpartition(".")[2]
    if isinstance(item, types.ModuleType):
        if item.__name__.startswith(USER_MODULES):
            for inner in names:
                if inner in vars(item):
                    yield from _global(vars(item), inner, vars(item)[inner], names)
        return
    if isinstance(item, type) and not is_user(item):
        return
    yield f"{where}.{name}", item, functools.partial(namespace.__setitem__, name)


def _of_mapping(values: Mapping[str, Any], path: str) -> Iterator[_Part]:
    for name, item in list(values.items()):
        yield f"{path}.{name}", item, functools.partial(values.__setitem__, name)  # type: ignore[attr-defined]


def _of_container(value: Any, path: str, put: Any) -> Iterator[_Part]:
    if isinstance(value, dict):
        for key, item in list(value.items()):
            if isinstance(key, (str, int, float, enum.Enum, tuple)):
                yield f"{path}[{key!r}]", item, functools.partial(dict.__setitem__, value, key)
    elif isinstance(value, (list, collections.deque)):
        for number, item in enumerate(value):
            yield f"{path}[{number}]", item, functools.partial(value.__setitem__, number)
    elif isinstance(value, tuple):
        for number, item in enumerate(value):
            setter = functools.partial(_put_item, value, number, put) if put is not None else None
            yield f"{path}[{number}]", item, setter


def _put_item(value: tuple[Any, ...], number: int, put: Callable[[Any], object], item: Any) -> None:
    items = [*value[:number], item, *value[number + 1 :]]
    put(type(value)(*items) if hasattr(value, "_fields") else type(value)(items))


def _put_default(function: types.FunctionType, number: int, item: Any) -> None:
    defaults = list(function.__defaults__ or ())
    defaults[number] = item
    function.__defaults__ = tuple(defaults)
