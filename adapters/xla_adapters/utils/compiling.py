"""How code behaves towards `torch.compile` while a step is traced."""

from __future__ import annotations

import sys
import types
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

_OF_HOOKS = r"Using `torch\.compile\(module\)` when there are global hooks on modules"


@contextmanager
def as_if_compiling(enabled: bool = True) -> Iterator[None]:
    """Inside the context, models take the code path they take under `torch.compile`, which reads no tensor values.

    In eager mode transformers reads masks and positions to find shortcuts (`find_packed_sequence_indices` of
    `masking_utils`, `padding_mask.all()`): one read per forward.

    Args:
        enabled: False cancels an enclosing context (optimizers compute in another order when compiling).
    """
    compiler: object = torch.compiler
    previous = torch.compiler._is_compiling_flag
    try:
        compiler._is_compiling_flag = enabled  # type: ignore[attr-defined]
        yield
    finally:
        compiler._is_compiling_flag = previous  # type: ignore[attr-defined]


@contextmanager
def compiled_code_inlined() -> Iterator[None]:
    """Inside the context, what `torch.compile` has compiled runs as if it had not been.

    The graph of a step holds it all; another compiler in the middle of it would need values that are not computed yet.
    """
    if "torch._dynamo" not in sys.modules:
        # Nothing is compiled yet, and the import takes seconds.
        yield
        return
    _ignore_warning_of_hooks()
    with torch.compiler.set_stance("force_eager"):
        yield


def _ignore_warning_of_hooks() -> None:
    """dynamo warns at each call of `torch.compile(model)` of hooks on all modules, which every step has.

    For good: to leave `warnings.catch_warnings` has all other warnings said again, which would be at each step.
    """
    if not any(message is not None and message.pattern == _OF_HOOKS for _, message, *_ in warnings.filters):
        warnings.filterwarnings("ignore", _OF_HOOKS, UserWarning)


@contextmanager
def as_in_one_graph() -> Iterator[None]:
    """Around a traced step: code behaves as under `torch.compile`, without a second compiler inside the graph."""
    with as_if_compiling(), compiled_code_inlined():
        yield


@contextmanager
def modules_compiled(modules: Iterable[torch.nn.Module], backend: str) -> Iterator[None]:
    """Compiles modules with `torch.compile`, until the exit. Inside steps they run as if they were not compiled.

    Args:
        modules: on the device.
        backend: the name of the dynamo backend.
    """
    compiled = list(modules)
    try:
        for module in compiled:
            call = torch.compile(_in_a_frame(module._call_impl), backend=backend)
            module._compiled_call_impl = call
        yield
    finally:
        for module in compiled:
            module._compiled_call_impl = None


def _in_a_frame(call: Callable[..., Any]) -> Callable[..., Any]:
    """A frame around a module's call: dynamo does not compile torch's own containers as outermost frames."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    return forward


_COMPILING = frozenset({"dynamo_ctx", "get_compiler_config", "_torchdynamo_orig_callable"})
_FRAME = _in_a_frame(print).__code__


def is_own_call_compiled(module: torch.nn.Module, call: object) -> bool:
    """Whether this is what `module.compile()` or `modules_compiled` made of the module's call, and nothing else."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    # `functools.wraps` would copy the attribute to another function, but not the globals.
    if dynamo is None or not isinstance(call, types.FunctionType) or call.__globals__ is not vars(dynamo):
        return False
    original = getattr(call, "_torchdynamo_orig_callable", None)
    if isinstance(original, types.FunctionType) and original.__code__ is _FRAME:
        (original,) = (cell.cell_contents for cell in original.__closure__ or ())
    return isinstance(original, types.MethodType) and original == module._call_impl


def unused_in_steps(module: torch.nn.Module) -> frozenset[str]:
    """The attributes of what `torch.compile(model)` returns that do not change what a step computes.

    Its forward is none if it is another than `torch.compile` made.
    """
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    if dynamo is None or type(module) is not dynamo.OptimizedModule:
        return frozenset()
    inner: Any = module._orig_mod
    forward = vars(module).get("forward")
    is_its_own = isinstance(forward, types.FunctionType) and forward.__globals__ is vars(dynamo)
    original = getattr(forward, "_torchdynamo_orig_callable", None) if is_its_own else None
    # A frame around a module of torch's own, or the module's call.
    if getattr(original, "__wrapped__", None) is inner or original == inner.__call__:
        return _COMPILING | {"forward"}
    return _COMPILING
