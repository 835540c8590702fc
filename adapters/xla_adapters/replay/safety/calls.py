"""`Calls`: calls of functions and modules in a step's code."""

from __future__ import annotations

import ast
import types
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from xla_adapters.replay.safety import allowlist
from xla_adapters.replay.safety.abstract_values import (
    DATA,
    UNKNOWN,
    At,
    DataMethod,
    Frame,
    Held,
    MadeModule,
    Method,
    Super,
    Value,
    either,
    empty_frame,
)
from xla_adapters.replay.safety.lookups import MODULE_CONTAINERS, Lookups, name_of
from xla_adapters.replay.safety.trusted import (
    is_core,
    is_library_file,
    is_promised,
    is_trusted,
    is_users_alone,
    is_users_class,
)
from xla_adapters.utils.nested_values import CONTAINERS
from xla_adapters.utils.torch_modes import is_own_call_compiled

_Options = Mapping[str, Value]


class Calls(Lookups):
    """Follows calls of user code, and allows calls of trusted modules and of functions on the allowlist."""

    def function(self, function: Any, owner: Any, arguments: Sequence[Value], options: _Options) -> Value:
        """Follows a function written in Python."""
        raise NotImplementedError

    def value(self, node: ast.expr, frame: Frame) -> Value:
        """What an expression may stand for."""
        raise NotImplementedError

    def call(self, node: ast.Call, at: At) -> Value:
        """What a call returns."""
        called = self.value(node.func, at.frame)
        if any(item is super for item in called.outside):
            return self._super(node, at)
        arguments = [self.value(argument, at.frame) for argument in node.args]
        options = {item.arg or "*": self.value(item.value, at.frame) for item in node.keywords}
        starred = [isinstance(argument, ast.Starred) for argument in node.args]
        if "*" in options or any(starred):
            # `f(*values)` may give any of these to any parameter.
            options["*"] = either([*arguments, *options.values()])
            arguments = arguments[: [*starred, True].index(True)]
        if not called.outside:
            raise at.unsafe(f"it calls {ast.unparse(node.func)}, of which nothing is known")
        return either(self._call_of(item, arguments, options, at) for item in called.outside).vaguely(called)

    def _call_of(self, item: Any, arguments: list[Value], options: dict[str, Value], at: At) -> Value:
        given = [*arguments, *options.values()]
        if isinstance(item, DataMethod):
            return self._data_method(item, arguments, given, at)
        if isinstance(item, nn.Module):
            self._check_given(given, at, known=True)
            return self.module(item, arguments, options)
        function = item.function if isinstance(item, Method) else getattr(item, "__func__", item)
        owner = item.owner if isinstance(item, Method) else getattr(item, "__self__", None)
        is_python = isinstance(function, types.FunctionType)
        known = self._framework.calls.get(function) if is_python else None
        if known is not None:
            self._check_given(given, at, known=True)
            return either(self.read(found, at.said, at) for found in known(owner))
        if isinstance(owner, Optimizer):
            return self._of_optimizer(owner, function, given, at)
        if isinstance(owner, MODULE_CONTAINERS) and function.__name__ in ("items", "values", "keys"):
            return _held(self.items(Value((owner,)), at))
        if isinstance(owner, nn.Module) and self._is_known_method(owner, function, at):
            self._check_given(given, at, known=True)
            self._below(owner)
            return DATA
        if function is checkpoint:
            return self._checkpointed(arguments, options, at)
        if is_python and is_promised(function):
            self.guards.definition(function)
            self._check_given(given, at, known=True)
            return DATA
        if is_python and (not is_trusted(function) or is_library_file(function.__code__.co_filename)):
            return self.function(function, owner, [*([] if owner is None else [Value((owner,))]), *arguments], options)
        return self._of_library(function, owner, arguments, options, at)

    def _of_library(
        self, function: Any, owner: Any, arguments: list[Value], options: dict[str, Value], at: At
    ) -> Value:
        given = [*arguments, *options.values()]
        # By identity: `==` may run user code.
        if any(function is holding for holding in allowlist.HOLDING_BUILTINS):
            held = [*arguments, *([options["*"]] if "*" in options else [])]
            return _held(either([*(self.items(argument, at) for argument in held), *options.values()]))
        if function is getattr and len(given) == 2 and given[1].constant and given[0].outside:
            return self.attribute(given[0], str(given[1].constant[0]), at)
        if function is len and arguments and all(isinstance(part, nn.Module) for part in arguments[0].outside):
            self.items(arguments[0], at)
            return DATA
        is_made = isinstance(function, MadeModule) or allowlist.is_torch_module(function)
        if is_made or (allowlist.is_allowed(function) and (owner is None or isinstance(owner, types.ModuleType))):
            self._check_given(given, at)
            return DATA if isinstance(function, MadeModule) or not is_made else Value((MadeModule(),))
        raise at.unsafe(f"it calls {at.said}")

    def _checkpointed(self, arguments: list[Value], options: dict[str, Value], at: At) -> Value:
        """`torch.utils.checkpoint.checkpoint`: calls its first argument with the others, and in the backward again."""
        if not arguments or not arguments[0].outside or not options.keys().isdisjoint(("*", "function", "context_fn")):
            raise at.unsafe(f"it calls {at.said} with a function of which nothing is known")
        own = ("use_reentrant", "preserve_rng_state", "determinism_check", "debug", "early_stop")
        others = {name: value for name, value in options.items() if name not in own}
        return either(self._call_of(item, arguments[1:], others, at) for item in arguments[0].outside)

    def _data_method(self, item: DataMethod, arguments: list[Value], given: list[Value], at: At) -> Value:
        owner, name = item.owner, item.name
        self._check_given(given, at)
        if name in allowlist.CHANGING_METHODS and owner.outside:
            if not all(isinstance(part, Held) for part in owner.outside):
                raise at.unsafe(f"it changes {name_of(owner.outside[0])} by {name}")
            return self.items(owner, at) if name.startswith("pop") else DATA
        if name in allowlist.READING_METHODS and owner.outside:
            found = self.items(owner, at, arguments[0].constant if name == "get" and arguments else ())
            return either([found if name == "get" else _held(found), *(given[1:] if arguments else given)])
        return DATA

    def _of_optimizer(self, owner: Optimizer, function: Any, given: list[Value], at: At) -> Value:
        if type(owner) not in allowlist.OPTIMIZERS:
            raise at.unsafe(f"it uses {type(owner).__name__}, which is none of the known optimizers")
        is_known = getattr(function, "__name__", "") in ("step", "zero_grad") and is_trusted(function)
        if not is_known or any(value.outside for value in given):
            raise at.unsafe(f"it calls {at.said}")
        return DATA

    def _is_known_method(self, owner: nn.Module, function: Any, at: At) -> bool:
        """A trusted method that only computes, or `super().name()` in the method of that name."""
        if not isinstance(function, types.FunctionType) or not is_trusted(function):
            return False
        name = function.__name__
        is_own = owner is at.frame.owner and name == getattr(at.frame.function, "__name__", "")
        return name == "forward" or name in self._framework.methods or is_own

    def _super(self, node: ast.Call, at: At) -> Value:
        frame = at.frame
        for cls in type(frame.owner).__mro__ if not node.args else ():
            member = vars(cls).get(frame.function.__name__)
            if getattr(member, "__func__", member) is frame.function:
                return Value((Super(frame.owner, cls),))
        raise at.unsafe(f"it calls {at.said}")

    def _check_given(self, given: Sequence[Value], at: At, *, known: bool = False) -> None:
        """Checks the arguments of a function that is not followed.

        Args:
            given: the arguments.
            at: the call.
            known: whether the function changes no object, and calls only functions on the allowlist.

        Raises:
            Unsafe: the function may change or call one of them.
        """
        parts = [part for value in given for part in value.outside]
        while parts:
            part = parts.pop()
            if isinstance(part, Held):
                parts.extend(part.value.outside)
                continue
            fits = self.is_plain(part) or _is_plain_class(part)
            if known and not fits:
                fits = isinstance(part, (nn.Module, Optimizer)) or type(part) in CONTAINERS
                fits = fits or allowlist.is_allowed(part) or (not callable(part) and is_core(type(part)))
            if not fits:
                raise at.unsafe(f"it hands {name_of(part)} to {at.said}")

    # ---- modules -----------------------------------------------------------------------------------

    def module(self, module: nn.Module, arguments: Sequence[Value] = (), options: _Options | None = None) -> Value:
        """Follows the forward of a module, and those of the user's modules below a trusted one."""
        name = f"{type(module).__name__}.forward"
        self.modules.setdefault(id(module), module)
        self._special_methods(module)
        self.guards.kind(module, name)
        self.guards.entry(vars(module), "forward", name)
        self.guards.member(type(module), "forward", name)
        own = vars(module).get("forward")
        forward = type(module).forward if own is None else own
        if not is_trusted(forward):
            is_bound = own is None or getattr(own, "__self__", None) is module
            given = [*([Value((module,))] if is_bound else []), *arguments]
            return self.function(getattr(forward, "__func__", forward), module, given, options or {})
        self._below(module)
        return DATA

    def _below(self, module: nn.Module) -> None:
        """Follows user code that a trusted forward calls: submodules, and methods that the user's classes override."""
        for part in module.modules():
            own = vars(part).get("forward")
            if part is not module and not is_trusted(type(part).forward if own is None else own):
                self.module(part, options={UNKNOWN: DATA})
            else:
                self._overrides(part)

    def _overrides(self, module: nn.Module) -> None:
        """Follows the methods that a user's class overrides of a trusted one, whose forward may call them."""
        self._special_methods(module)
        if is_users_alone(type(module)):
            return
        for cls in filter(is_users_class, type(module).__mro__):
            for name, member in vars(cls).items():
                if isinstance(member, types.FunctionType) and name not in allowlist.OUTSIDE_STEPS:
                    self.function(member, module, [Value((module,))], {UNKNOWN: DATA})

    def _special_methods(self, module: nn.Module) -> None:
        """Follows the user's overrides of methods that all modules have.

        Raises:
            Unsafe: one is a special method.
        """
        cls = type(module)
        self.guards.code_of(cls)
        for name in vars(module).keys() & vars(nn.Module).keys() - allowlist.OUTSIDE_STEPS - {"forward"}:
            value = vars(module)[name]
            if name == "_compiled_call_impl" and is_own_call_compiled(module, value):
                # In a step it runs as if it were not compiled.
                self.guards.entry(vars(module), name, f"{cls.__qualname__}.{name}")
                continue
            if callable(value):
                raise At(ast.Pass(), empty_frame("the step")).unsafe(f"a {cls.__qualname__} has a {name} of its own")
        for base in filter(is_users_class, cls.__mro__):
            for name, member in vars(base).items():
                if isinstance(member, types.FunctionType) and name not in allowlist.OUTSIDE_STEPS:
                    if name.startswith("__") and name.endswith("__"):
                        raise At(ast.Pass(), empty_frame(member.__code__.co_filename)).unsafe(
                            f"{cls.__qualname__} has a {name} of its own"
                        )
                    if name in vars(nn.Module):
                        self.function(member, module, [Value((module,))], {UNKNOWN: DATA})


def _held(value: Value) -> Value:
    return Value((Held(value),)) if value.outside else DATA


def _is_plain_class(item: Any) -> bool:
    """Whether `isinstance` with a class runs no user code."""
    return isinstance(item, type) and not is_users_class(type(item))
