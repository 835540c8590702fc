"""What an optimizer keeps on the host beside its groups and its state, and what its step does there unseen.

To learn its numbers the optimizer's own `step` is run on a stand-in. What both of them hold must not be changed by it.
"""

from __future__ import annotations

import builtins
import dis
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.optim import Optimizer, lr_scheduler
from torch.optim import optimizer as torch_optimizer

from xla_adapters.location import is_of_user
from xla_adapters.replay.read_facts import content_of, is_of_library
from xla_adapters.replay.values import is_simple

_CONTAINERS = (dict, OrderedDict, defaultdict, Counter, list, set, deque, tuple, bytearray)
_NESTING = 8
# Attributes that torch gives every optimizer, which only its own code uses.
_OF_TORCH = {
    "state",
    "param_groups",
    "step",
    "_cuda_graph_capture_health_check",
    *(
        f"_optimizer_{what}_{when}_hooks"
        for what in ("step", "state_dict", "load_state_dict")
        for when in ("pre", "post")
    ),
}
# Libraries whose functions return something and do nothing else, mostly.
_KNOWN_LIBRARIES = {
    *("torch", "torch_xla", "numpy", "math", "cmath", "functools", "itertools", "operator", "typing", "warnings"),
    *("collections", "copy", "transformers", "xla_adapters"),
}
_DOING_BUILTINS = {"print", "open", "input", "exec", "eval", "globals", "vars", "setattr", "delattr", "__import__"}


# ---- hooks -------------------------------------------------------------------------------------------


def addition_to_step(optimizer: Optimizer) -> str | None:
    """What was put around an optimizer's step, whose Python a replay would leave out; None if nothing."""
    name, own = type(optimizer).__name__, vars(optimizer)
    for hooks in (
        torch_optimizer._global_optimizer_pre_hooks,
        torch_optimizer._global_optimizer_post_hooks,
        own.get("_optimizer_step_pre_hooks", {}),
        own.get("_optimizer_step_post_hooks", {}),
    ):
        for hook in hooks.values():
            if not (getattr(hook, "__module__", None) or "").startswith("xla_adapters"):
                return f"the step of {name} has a hook ({getattr(hook, '__qualname__', type(hook).__name__)})"
    step = own.get("step")
    if step is not None and not _is_of_scheduler(step, type(optimizer)):
        return f"the step of {name} was replaced by another one"
    return None


def _is_of_scheduler(step: Any, kind: type) -> bool:
    """Whether this is what learning rate schedules put around a step, to know that it was called."""
    code = getattr(step, "__code__", None)
    return (
        code is not None
        and code.co_filename == lr_scheduler.__file__
        and getattr(step, "__wrapped__", None) is _defined(kind, "step")
    )


def _defined(kind: type, name: str) -> Any:
    """What a name means in a class or those it derives from, as it stands there; None if nothing."""
    return next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), None)


def step_of(optimizer: Optimizer) -> Callable[[Optimizer], object]:
    """As its class defines it, without the hooks that torch puts around it."""
    step: Any = type(optimizer).step
    # Whoever wraps a step takes over its marks: only the code tells whose it is.
    is_torchs = getattr(step, "hooked", False) and step.__code__.co_filename == torch_optimizer.__file__
    return step.__wrapped__ if is_torchs else step  # type: ignore[no-any-return]


# ---- copies ------------------------------------------------------------------------------------------


def is_container(value: Any) -> bool:
    """Whether a value is a container of Python's own."""
    return type(value) in _CONTAINERS


def copied(value: Any, depth: int = _NESTING) -> Any:
    """A copy of nested containers; what else they hold is shared."""
    kind = type(value)
    if not depth or kind not in _CONTAINERS:
        return value
    if kind is tuple:
        items = tuple(copied(item, depth - 1) for item in value)
        return value if all(map(_is, items, value)) else items
    copy = value.copy()
    if isinstance(copy, dict):
        for key, item in copy.items():
            copy[key] = copied(item, depth - 1)
    elif isinstance(copy, (list, deque)):
        for index, item in enumerate(value):
            copy[index] = copied(item, depth - 1)
    return copy


def same(left: Any, right: Any, depth: int = _NESTING) -> bool:
    """Whether nested containers hold the same."""
    if left is right:
        return True
    if type(left) is not type(right):
        return False
    if isinstance(left, (set, bytearray)) or is_simple(left, 0):
        return bool(left == right)
    if not depth or not is_container(left) or len(left) != len(right):
        return False
    if isinstance(left, dict):
        return all(map(_is_same, left, right)) and all(
            same(mine, theirs, depth - 1) for mine, theirs in zip(left.values(), right.values(), strict=True)
        )
    return all(same(mine, theirs, depth - 1) for mine, theirs in zip(left, right, strict=True))


def _is(left: Any, right: Any) -> bool:
    return left is right


def _is_same(left: Any, right: Any) -> bool:
    return same(left, right, 1)


# ---- the user's own optimizers -------------------------------------------------------------------------


class OwnStep:
    """The user's own code in the step of a kind of optimizer.

    Args:
        kind: the optimizer's class.

    Attributes:
        functions: of the user, among what the step calls.
        obstacle: what they may do that is not seen from outside; None if nothing.
    """

    def __init__(self, kind: type[Optimizer]) -> None:
        self._kind = kind
        self._bases = [base for base in kind.__mro__ if not is_of_library(base)]
        self._seen: set[int] = set()
        self._names: set[str] = set()
        self._waiting: list[types.FunctionType] = []
        self._method("step")
        self.functions: list[types.FunctionType] = []
        self.obstacle: str | None = None
        while self._waiting:
            function = self._waiting.pop()
            if is_of_user(function.__code__.co_filename):
                self.functions.append(function)
                self.obstacle = self.obstacle or self._examine(function)
            for code in _codes(function.__code__):
                for name in code.co_names:
                    self._method(name)
        if self.functions:
            self.obstacle = self.obstacle or self._shared()

    def hidden(self, optimizer: Optimizer) -> str | None:
        """What the optimizer holds that the step may change unseen; None if nothing."""
        if not self.functions:
            return None
        for name, value in vars(optimizer).items():
            if name not in _OF_TORCH and not is_simple(value):
                return f"its attribute {name!r} is a {type(value).__name__}"
        for group in optimizer.param_groups:
            for name, value in group.items():
                if name != "params" and not is_simple(value) and not isinstance(value, torch.Tensor):
                    return f"{name!r} in a group is a {type(value).__name__}"
        return None

    def _method(self, name: str) -> None:
        """Has a method looked into, of whatever class it is: of several each may call the next."""
        if name in self._names:
            return
        self._names.add(name)
        for base in self._kind.__mro__:
            if base is not Optimizer and name in vars(base):
                self._follow(vars(base)[name])

    def _follow(self, item: Any) -> None:
        if isinstance(item, property):
            item = item.fget
        item = getattr(item, "__func__", item)
        while isinstance(item, types.FunctionType) and id(item) not in self._seen:
            self._seen.add(id(item))
            self._waiting.append(item)
            item = getattr(item, "__wrapped__", None)

    def _shared(self) -> str | None:
        """What the user's classes hold for all their optimizers."""
        for base in self._bases:
            for name, value in vars(base).items():
                what = None if name.startswith("__") or name not in self._names else self._unknown(value)
                if what is not None:
                    return f"{base.__name__}.{name} is {what}"
        return None

    def _examine(self, function: types.FunctionType) -> str | None:
        free = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        for name, value in _outside(function, free):
            what = self._unknown(value)
            if what is not None:
                return f"{function.__qualname__} uses {name!r}, {what}"
        for code in _codes(function.__code__):
            for instruction in dis.get_instructions(code):
                name, operation = str(instruction.argval), instruction.opname
                if operation in ("STORE_GLOBAL", "DELETE_GLOBAL"):
                    return f"{function.__qualname__} sets the global {name!r}"
                if operation in ("STORE_DEREF", "DELETE_DEREF") and name in free:
                    return f"{function.__qualname__} sets {name!r} of the function around it"
                if operation == "IMPORT_NAME" and name.split(".")[0] not in _KNOWN_LIBRARIES:
                    return f"{function.__qualname__} imports {name!r}"
                if operation == "STORE_ATTR" and any(name in vars(owner) for owner in self._owners(function)):
                    return f"{function.__qualname__} sets {name!r}, which is not the optimizer's alone"
        return None

    def _owners(self, function: types.FunctionType) -> Iterator[Any]:
        """The user's classes and modules, whose attributes a function may set."""
        yield from self._bases
        for name in function.__code__.co_names:
            value = function.__globals__.get(name)
            if isinstance(value, types.ModuleType) and not is_of_library(value):
                yield value

    def _unknown(self, value: Any) -> str | None:
        """What is said of a value that the step may change unseen; None if it cannot."""
        if value is _UNKNOWN:
            return "of which nothing is known"
        if isinstance(value, (types.FunctionType, staticmethod, classmethod, property)):
            self._follow(value)
            return None
        if isinstance(value, types.ModuleType):
            known = not is_of_library(value) or value.__name__.split(".")[0] in _KNOWN_LIBRARIES
            return None if known else "a module"
        if isinstance(value, type):
            return None if is_of_library(value) or issubclass(value, Optimizer) else "a class"
        if type(value) in (tuple, frozenset):
            return next((what for item in value if (what := self._unknown(item)) is not None), None)
        if is_simple(value, 0) or type(value).__module__ == "typing" or isinstance(value, _BUILTIN):
            return None
        return f"a {type(value).__name__}"


# What a name stands for of which nothing is known.
_UNKNOWN = object()
_BUILTIN = (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType)


def _outside(function: types.FunctionType, free: Mapping[str, types.CellType]) -> Iterator[tuple[str, Any]]:
    """What a function finds under names that are not its own."""
    for name, cell in free.items():
        yield name, content_of(cell)
    attributes = {name for code in _codes(function.__code__) for name in code.co_names}
    for code in _codes(function.__code__):
        for instruction in dis.get_instructions(code):
            if instruction.opname not in ("LOAD_GLOBAL", "LOAD_NAME"):
                continue
            name = str(instruction.argval)
            if name in function.__globals__:
                value = function.__globals__[name]
                yield name, value
                if isinstance(value, types.ModuleType) and not is_of_library(value):
                    for attribute in attributes & vars(value).keys():
                        yield f"{name}.{attribute}", vars(value)[attribute]
            elif name in _DOING_BUILTINS or not hasattr(builtins, name):
                yield name, _UNKNOWN


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """A piece of code, and those of the functions inside."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)
