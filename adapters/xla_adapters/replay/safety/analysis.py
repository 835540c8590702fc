"""`Analysis`: follows the statements of a step's code, to find out whether a replay may skip it.

Objects from before the step (the model, globals, helper objects) are followed through the code. Allowed are constants,
tensors, modules, Python's own containers of these, functions on the allowlist, and functions whose source can be
followed. Anything else is the reason why the step is traced. All that the code reads is guarded.
"""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
import os
import time
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from xla_adapters.replay.safety.abstract_values import (
    DATA,
    MARKERS,
    UNKNOWN,
    At,
    Batch,
    Frame,
    Held,
    Unsafe,
    Value,
    either,
    empty_frame,
)
from xla_adapters.replay.safety.allowlist import CONTEXTS
from xla_adapters.replay.safety.expressions import Expressions, held
from xla_adapters.replay.safety.guards import ReadGuards, content_of
from xla_adapters.replay.safety.lookups import name_of
from xla_adapters.replay.safety.trusted import lookup

# Of calls.
_DEPTH = 24
# A loop is followed until its variables take no new values, at most this often.
_ROUNDS = 16
# The code of files that were changed after this may differ from the code that runs.
_BEGAN = time.time()


@dataclass(frozen=True)
class Verdict:
    """The result of an analysis.

    Attributes:
        reason: why a replay must not skip the code; None if it may.
        guards: on what the code reads.
        modules: the modules that it uses.
        tensors: the tensors from before the step that it reads and that are in no module.
    """

    reason: str | None
    guards: ReadGuards
    modules: tuple[torch.nn.Module, ...] = ()
    tensors: tuple[torch.Tensor, ...] = ()


class Analysis(Expressions):
    """Follows functions, statement by statement.

    Args:
        framework: describes the framework around the code.
    """

    def __init__(self, framework: Any) -> None:
        super().__init__(framework)
        self._done: dict[Any, Value] = {}
        self._stack: list[Any] = []

    def verdict(self, reason: str | None) -> Verdict:
        """The result, with what was found so far.

        Args:
            reason: see `Verdict`.
        """
        return Verdict(reason, self.guards, tuple(self.modules.values()), tuple(self.tensors.values()))

    # ---- functions ---------------------------------------------------------------------------------

    def examine(
        self, function: Any, arguments: Sequence[Value] = (), options: Mapping[str, Value] | None = None
    ) -> Value:
        """Follows the step's function, a bound method, or a module's forward.

        Args:
            function: the step.
            arguments: positional arguments, without `self`.
            options: keyword arguments. With `UNKNOWN` among them, arguments that are not given may be anything.

        Raises:
            Unsafe: it does something that a replay must not skip, or that is not known.
        """
        if isinstance(function, torch.nn.Module):
            return self.module(function, arguments, options)
        at, given, options = At(ast.Pass(), empty_frame("the step")), list(arguments), dict(options or {})
        while isinstance(function, functools.partial):
            self.guards.contents(function.keywords, "the arguments of a partial")
            given = [*(self.read(value, "an argument", at) for value in function.args), *given]
            options = {**{name: self.read(value, name, at) for name, value in function.keywords.items()}, **options}
            function = function.func
        if not isinstance(function, (types.FunctionType, types.MethodType)):
            self.guards.kind(function, "the step")
            function = getattr(function, "__call__", function)  # noqa: B004 (an object that is called)
        owner = getattr(function, "__self__", None)
        own = [] if owner is None else [Value((owner,))]
        return self.function(getattr(function, "__func__", function), owner, [*own, *given], options)

    def check_returned(self, value: Value) -> None:
        """Checks that a result contains no objects from before the step, which a replay would return as copies.

        Raises:
            Unsafe: it contains one.
        """
        for item in value.outside:
            if isinstance(item, Held):
                self.check_returned(item.value)
            elif not isinstance(item, Batch):
                raise Unsafe(f"it returns {name_of(item)}")

    def function(self, function: Any, owner: Any, arguments: Sequence[Value], options: Mapping[str, Value]) -> Value:
        """Follows a function written in Python."""
        if not isinstance(function, types.FunctionType):
            raise Unsafe(f"{name_of(function)} is no plain function")
        while hasattr(function, "__wrapped__") and function.__globals__["__name__"].startswith("torch."):
            # A decorator of torch's (`torch.no_grad()`).
            self._decorator(function)
            function = function.__wrapped__
            # What `torch.compile` was given; in a step it runs as if it were not compiled.
            if isinstance(function, torch.nn.Module):
                return self.module(function, arguments, options)
            if isinstance(function, types.MethodType):
                function, owner = function.__func__, function.__self__
                arguments = [Value((owner,)), *arguments]
            if not isinstance(function, types.FunctionType):
                raise Unsafe(f"{name_of(function)} was compiled by torch.compile, and is not followed")
        key = (function, id(owner), *(value.key() for value in arguments), *((k, v.key()) for k, v in options.items()))
        if key in self._done:
            return self._done[key]
        if key in self._stack:
            # A recursive call: its result may be any of its arguments.
            return either([*arguments, *options.values()])
        if len(self._stack) > _DEPTH:
            raise Unsafe(f"{function.__qualname__} calls too deeply to be followed")
        node, file, first = source_of(function)
        self.guards.definition(function)
        frame = Frame(function, owner, file, first)
        self._bind(node, frame, arguments, options)
        self._stack.append(key)
        try:
            if isinstance(node, ast.Lambda):
                frame.results.append(self.value(node.body, frame))
            else:
                self._block(node.body, frame)
        finally:
            self._stack.pop()
        self._done[key] = either(frame.results)
        return self._done[key]

    def _decorator(self, function: types.FunctionType, depth: int = 4) -> None:
        """Guards the closure of a decorator of torch's, which holds the context that it enters."""
        self.guards.definition(function)
        for cell in function.__closure__ or ():
            self.guards.cell(cell, f"the decorator of {function.__qualname__}")
            held = content_of(cell)
            if isinstance(held, CONTEXTS):
                self.guards.kind(held, f"the decorator of {function.__qualname__}")
                for name in vars(held):
                    self.guards.entry(vars(held), name, f"the decorator's {name}")
            elif isinstance(held, types.FunctionType) and held is not getattr(function, "__wrapped__", None) and depth:
                self._decorator(held, depth - 1)

    def _bind(
        self,
        node: ast.FunctionDef | ast.Lambda,
        frame: Frame,
        arguments: Sequence[Value],
        options: Mapping[str, Value],
    ) -> None:
        spec, signature = node.args, inspect.signature(frame.function, follow_wrapped=False)
        defaults = {
            name: self.read(parameter.default, name, At(node, frame))
            for name, parameter in signature.parameters.items()
            if parameter.default is not parameter.empty
        }
        names = [item.arg for item in (*spec.posonlyargs, *spec.args)]
        given = dict(zip(names, arguments, strict=False))
        for name in (*names, *(item.arg for item in spec.kwonlyargs)):
            found = given.get(name, options.get(name, defaults.get(name, DATA)))
            # `f(*values)` may give any of these; with UNKNOWN, the caller is not known.
            marks = ("*", UNKNOWN) if name not in given and name not in options else ()
            frame.names[name] = either([found, *(options[mark] for mark in marks if mark in options)])
        known = {*names, *(item.arg for item in spec.kwonlyargs), UNKNOWN}
        rest = [*arguments[len(names) :], *(value for name, value in options.items() if name not in known)]
        for extra in (spec.vararg, spec.kwarg):
            if extra is not None:
                frame.names[extra.arg] = held(rest)

    # ---- statements --------------------------------------------------------------------------------

    def _block(self, body: Sequence[ast.stmt], frame: Frame) -> bool:
        """Follows statements; returns whether the ones after them are never reached."""
        for statement in body:
            kind = type(statement).__name__.lower()
            handler = getattr(self, f"_do_{kind}", None)
            if handler is None:
                raise At(statement, frame).unsafe(f"a statement that is not followed: {kind}")
            if handler(statement, frame):
                return True
        return False

    def _branches(self, frame: Frame, *bodies: Sequence[ast.stmt]) -> None:
        frame.branches += 1
        for body in bodies:
            self._block(body, frame)
        frame.branches -= 1

    def _loop(self, node: ast.For | ast.While, frame: Frame) -> None:
        """Follows a loop several times, because an iteration sees the variables that the one before has set."""
        for _ in range(_ROUNDS):
            before = {name: value.key() for name, value in frame.names.items()}
            self._branches(frame, node.body)
            if {name: value.key() for name, value in frame.names.items()} == before:
                self._branches(frame, node.orelse)
                return
        raise At(node, frame).unsafe("a loop whose variables take too many values to be followed")

    def _do_pass(self, node: ast.stmt, frame: Frame) -> None:
        """`pass`, `break` and `continue` have no effect on what names may stand for."""

    _do_break = _do_continue = _do_pass

    def _do_assign(self, node: ast.Assign, frame: Frame) -> None:
        for target in node.targets:
            pairs = [(target, node.value)]
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = list(zip(target.elts, node.value.elts, strict=False))
                if len(target.elts) != len(node.value.elts) or any(isinstance(t, ast.Starred) for t, _ in pairs):
                    pairs = [(target, node.value)]
            moves = isinstance(target, ast.Attribute) and self._moves(target, node.value, frame)
            values = [self.value(value, frame) for _, value in pairs]
            if moves and not values[0].outside:
                continue
            for (part, _), value in zip(pairs, values, strict=True):
                self.assign(part, value, frame)

    def _moves(self, target: ast.Attribute, value: ast.expr, frame: Frame) -> bool:
        """Whether it is `owner.name = owner.name.to(...)`, which sets nothing new once the tensor is on the device.

        Before, it may be on the host: the guard on the attribute tells when it has been moved.
        """
        if not isinstance(value, ast.Call) or ast.unparse(value.func) != f"{ast.unparse(target)}.to":
            return False
        owners = self.value(target.value, frame).outside
        if len(owners) != 1 or isinstance(owners[0], (*MARKERS, torch.nn.Module)):
            return False
        tensor = getattr(owners[0], "__dict__", {}).get(target.attr)
        if type(tensor) is not torch.Tensor or lookup(type(owners[0]), "__setattr__") is not object.__setattr__:
            return False
        self.moved[id(tensor)] = tensor
        return True

    def _do_annassign(self, node: ast.AnnAssign, frame: Frame) -> None:
        if node.value is not None:
            self.assign(node.target, self.value(node.value, frame), frame)

    def _do_augassign(self, node: ast.AugAssign, frame: Frame) -> None:
        held, at = self.value(node.target, frame), At(node, frame)
        if held.outside:
            raise at.unsafe(f"it changes {name_of(held.outside[0])}")
        self.check_computed([self.value(node.value, frame)], at)
        self.assign(node.target, DATA, frame)

    def _do_return(self, node: ast.Return, frame: Frame) -> bool:
        if node.value is not None:
            frame.results.append(self.value(node.value, frame))
        return True

    def _do_expr(self, node: ast.Expr, frame: Frame) -> None:
        self.value(node.value, frame)

    def _do_if(self, node: ast.If, frame: Frame) -> bool:
        test = self.test(node.test, frame)
        if test.constant:
            return self._block(node.body if test.constant[0] else node.orelse, frame)
        self._branches(frame, node.body, node.orelse)
        return False

    def _do_while(self, node: ast.While, frame: Frame) -> None:
        self.test(node.test, frame)
        self._loop(node, frame)
        self.test(node.test, frame)

    def _do_for(self, node: ast.For, frame: Frame) -> None:
        self.assign(node.target, self.items(self.value(node.iter, frame), At(node, frame)), frame)
        self._loop(node, frame)

    def _do_with(self, node: ast.With, frame: Frame) -> None:
        for item in node.items:
            given = item.context_expr
            for call in [given.body, given.orelse] if isinstance(given, ast.IfExp) else [given]:
                called = self.value(call.func, frame).outside if isinstance(call, ast.Call) else ()
                if not called or not all(any(context is kind for kind in CONTEXTS) for context in called):
                    raise At(call, frame).unsafe(f"it enters {ast.unparse(call)}")
            self.value(given, frame)
            if item.optional_vars is not None:
                self.assign(item.optional_vars, DATA, frame)
        self._block(node.body, frame)

    def _do_assert(self, node: ast.Assert, frame: Frame) -> None:
        self.test(node.test, frame)

    def _do_raise(self, node: ast.Raise, frame: Frame) -> bool:
        for part in (node.exc, node.cause):
            if part is not None:
                self.value(part, frame)
        return True

    def _do_delete(self, node: ast.Delete, frame: Frame) -> None:
        if not all(isinstance(target, ast.Name) for target in node.targets):
            raise At(node, frame).unsafe(f"it deletes {ast.unparse(node.targets[0])}")


# ---- sources -----------------------------------------------------------------------------------------


def source_of(function: types.FunctionType) -> tuple[ast.FunctionDef | ast.Lambda, str, int]:
    """The syntax tree of a function, its file, and the line where its source begins.

    Raises:
        Unsafe: the source cannot be read, or may not be what runs.
    """
    code = function.__code__
    # For files that only the module's loader can read, as those in archives.
    linecache.lazycache(code.co_filename, function.__globals__)
    return _source_of(code, function.__qualname__, code.co_filename)


# Cached, so that a file that is edited later does not matter. The file is part of the key, because code objects of two
# files may be equal.
@functools.lru_cache(maxsize=4096)
def _source_of(code: types.CodeType, name: str, file: str) -> tuple[ast.FunctionDef | ast.Lambda, str, int]:
    try:
        lines = _lines_of(code)
        is_indented = lines[0][:1].isspace()
        # Not dedented: that would change the text of multi-line strings.
        tree = ast.parse(("if True:\n" if is_indented else "") + "".join(lines))
    except (OSError, TypeError, SyntaxError):
        advice = "; define it in a cell without %%time" if file.startswith("<timed ") else ""
        raise Unsafe(f"the source of {name} cannot be read{advice}") from None
    kept = linecache.cache.get(file, ())
    # A debugger writes a notebook's cell into a file. Its source is what IPython has kept of it, without a time.
    is_cell = len(kept) == 4 and kept[1] is None
    if not is_cell and os.path.exists(file) and os.stat(file).st_mtime > _BEGAN:
        raise Unsafe(f"{file} was written to after this process began: what runs may be something else")
    ast.increment_lineno(tree, -is_indented)
    first = code.co_firstlineno
    if code.co_name == "<lambda>":
        places = ((line, column) for line, _, column, end in code.co_positions() if line and column is not None and end)
        begins = min(places, default=None)
        lambdas = [node for node in ast.walk(tree) if isinstance(node, ast.Lambda)]
        found: list[Any] = [node for node in lambdas if (node.body.lineno + first - 1, node.body.col_offset) == begins]
    else:
        found = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == code.co_name][:1]
    if len(found) != 1:
        raise Unsafe(f"the source of {name} cannot be told from what else is in its lines")
    return found[0], file, first


def _lines_of(code: types.CodeType) -> list[str]:
    # inspect.getsourcelines would look for the module first: for the files of all modules that are imported.
    linecache.checkcache(code.co_filename)
    lines = linecache.getlines(code.co_filename)[code.co_firstlineno - 1 :]
    if not lines:
        raise OSError
    return inspect.getblock(lines)
