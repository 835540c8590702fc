"""What torch is doing in this thread (compiling, inference, transforms, dispatch modes), and on which kind of device.

Each context manager leaves torch as it found it, also after Ctrl-C in the middle of a `with` block's exit.
"""

from __future__ import annotations

import contextlib
import os
import sys
import types
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from operator import methodcaller
from pathlib import Path
from types import CodeType, GeneratorType
from typing import Any, ParamSpec, TypeVar
from weakref import WeakSet

import torch
import torch.overrides
import torch.utils._python_dispatch
from torch._C import _functorch
from torch._functorch import eager_transforms, vmap
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils._python_dispatch import _disable_current_modes

from xla_adapters.utils.patching import replaced

_TPU = "tpu"


def device_type() -> str:
    """`"tpu"` once TorchTPU is loaded, and `"xla"` otherwise."""
    return _TPU if torch._C._get_privateuse1_backend_name() == _TPU else "xla"


def is_fake(value: object) -> bool:
    """Whether a value is a placeholder for a tensor on the device, and has no value itself."""
    if is_bare(value):
        return not _under_users_mode()
    return isinstance(value, (FakeTensor, FunctionalTensor))


def is_bare(value: object) -> bool:
    """Whether a value is an XLA tensor without torch's functional wrapper.

    Operations return such tensors under a dispatch mode of the user. Their value before it cannot be restored.
    """
    if not isinstance(value, torch.Tensor) or type(value) not in (torch.Tensor, torch.nn.Parameter):
        return False
    return value.device.type == "xla" and not torch._is_functional_tensor(value)


def _under_users_mode() -> bool:
    modes = torch._C._len_torch_dispatch_stack()
    # torch's own (tracing) modes have a key.
    return modes > 0 and getattr(torch._C._get_dispatch_stack_at(modes - 1), "_mode_key", None) is None


# What ends a transform: each takes a wrapped tensor first, and returns the one in it, or a view of that.
_ENDS = ((vmap, "_remove_batch_dim"), (eager_transforms, "_unwrap_for_grad"))


# Whether a transform is under way.
in_transform: Callable[[], bool] = torch._C._are_functorch_transforms_active


def unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that transforms have wrapped, which has a memory; any other one is returned as it is."""
    while _functorch.is_functorch_wrapped_tensor(tensor):
        tensor = _functorch.get_unwrapped(tensor)
    return tensor


@contextmanager
def results_of_transforms(notify: Callable[[Any], None]) -> Iterator[None]:
    """Calls `notify` with each result of a transform: no function mode sees how these are made."""

    def notifying(end: Callable[..., Any]) -> Callable[..., Any]:
        def ended(*args: Any) -> Any:
            result = end(*args)
            notify(result)
            return result

        return ended

    with ExitStack() as stack:
        for owner, name in _ENDS:
            stack.enter_context(replaced(owner, name, notifying(getattr(owner, name))))
        yield


@contextmanager
def inference_mode_as_no_grad() -> Iterator[None]:
    """Inside the context, `torch.inference_mode()` only disables gradients, as `torch.no_grad()`.

    torch_xla cannot compute with inference tensors (`Cannot set version_counter for inference tensor`). If it is on
    already, it is switched off inside.
    """
    with ExitStack() as stack:
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.no_grad())
        stack.enter_context(
            replaced(torch.inference_mode, "__enter__", _without_gradients(torch.inference_mode.__enter__))
        )
        yield


# Models that were trained, and may be used outside a run.
_models: WeakSet[torch.nn.Module] = WeakSet()


def use_no_grad_for_inference_mode(model: torch.nn.Module) -> None:
    """The same from now on, as long as the model lives and is on an XLA device: it may be used after its training."""
    _models.add(model)
    enter = torch.inference_mode.__enter__
    if not hasattr(enter, "of_xla_adapters"):
        torch.inference_mode.__enter__ = _without_gradients(enter, _some_model_is_on_device)  # type: ignore[method-assign]


def _some_model_is_on_device() -> bool:
    firsts = (next(model.parameters(), None) for model in _models)
    return any(first is not None and first.device.type == device_type() for first in firsts)


def _without_gradients(
    enter: Callable[[torch.inference_mode], None], applies: Callable[[], bool] = lambda: True
) -> Callable[[torch.inference_mode], None]:
    def without_gradients(self: torch.inference_mode) -> None:
        if not self.mode or not applies():
            enter(self)
            return
        # The stock `__exit__` leaves what it finds there.
        self._inference_mode_context = torch.no_grad()  # type: ignore[assignment]
        self._inference_mode_context.__enter__()

    without_gradients.of_xla_adapters = True  # type: ignore[attr-defined]
    return without_gradients


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


_CONTEXT_EDGES: frozenset[CodeType] = frozenset(
    getattr(contextlib._GeneratorContextManager, name).__code__ for name in ("__enter__", "__exit__")
)
_UP_AND_DOWN = (torch.autocast_increment_nesting, torch.autocast_decrement_nesting)
_call = methodcaller("__call__")
_P = ParamSpec("_P")
_R = TypeVar("_R")


class TorchModes:
    """A snapshot of torch's gradient mode, autocast settings for XLA, compiling flag and state of function modes.

    Create it before a `with` block and call `restore()` after it: no mode of the block is then still active.
    """

    def __init__(self) -> None:
        self._gradients = torch.is_grad_enabled()
        self._autocast = torch.is_autocast_enabled(device_type())
        self._dtype = torch.get_autocast_dtype(device_type())
        self._caches = torch.is_autocast_cache_enabled()
        self._nesting = _autocast_nesting()
        self._compiling = torch.compiler._is_compiling_flag
        self._function_state: Any = torch._C._get_torch_function_state()  # type: ignore[attr-defined]

    def restore(self, *, compiling: bool = True) -> None:
        """Sets the modes to what they were.

        Args:
            compiling: whether the compiling flag is one of them.
        """
        torch.set_grad_enabled(self._gradients)
        torch._C._set_torch_function_state(self._function_state)  # type: ignore[attr-defined]
        torch.set_autocast_enabled(device_type(), self._autocast)
        torch.set_autocast_dtype(device_type(), self._dtype)
        torch.set_autocast_cache_enabled(self._caches)
        while _autocast_nesting() > self._nesting:
            torch.autocast_decrement_nesting()
        if compiling:
            torch.compiler._is_compiling_flag = self._compiling


def _autocast_nesting() -> int:
    # torch cannot return the nesting without changing it. `map` runs both calls in C, so Ctrl-C cannot come in between.
    return int([*map(_call, _UP_AND_DOWN)][-1])


def without_dispatch_modes(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorator: disables the user's dispatch modes while the function runs.

    Under such a mode torch returns the raw device tensor instead of a functional tensor.
    """

    @wraps(function)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if not torch._C._len_torch_dispatch_stack():
            return function(*args, **kwargs)
        with _disable_current_modes():
            return function(*args, **kwargs)

    return run


def leave_function_mode(mode: TorchFunctionMode) -> None:
    """Removes all occurrences of a mode from this thread's stack of function modes."""
    modes = _get_current_function_mode_stack()
    if mode in modes:
        for _ in modes:
            _pop_mode()
        for other in modes:
            if other is not mode:
                _push_mode(other)


def finish_interrupted_exits(error: BaseException) -> None:
    """Leaves now what an error interrupted in the middle of the entry or exit of a `with` block.

    The generator of such a context would restore what it has changed only when the error is garbage collected. For
    example torch takes modes off its stack temporarily: a mode of a finished step would become active in other code.
    """
    seen: set[int] = set()
    met: BaseException | None = error
    while met is not None and id(met) not in seen:
        seen.add(id(met))
        traceback = met.__traceback__
        while traceback is not None:
            if traceback.tb_frame.f_code in _CONTEXT_EDGES:
                generator = getattr(traceback.tb_frame.f_locals.get("self"), "gen", None)
                if isinstance(generator, GeneratorType) and not generator.gi_running:
                    generator.close()
            traceback = traceback.tb_next
        met = met.__context__


@contextmanager
def keeping_parameters() -> Iterator[None]:
    """Parameters stay the same objects while the body moves a module: torch swaps the new contents into them."""
    options: Any = torch.__future__
    with ExitStack() as stack:
        stack.callback(options.set_swap_module_params_on_conversion, options.get_swap_module_params_on_conversion())
        options.set_swap_module_params_on_conversion(True)
        yield


# ---- functions that are replaced ---------------------------------------------------------------------

_OF_TORCH = f"{Path(torch.__file__).parent}{os.sep}"
_FUNCTIONAL = (vars(torch.nn.functional), vars(torch.functional))
# By their code, which a function that replaces one, and calls it, does not have.
_BY_CODE = {
    item.__code__: item for module in _FUNCTIONAL for item in module.values() if type(item) is types.FunctionType
}
_BUILTIN = (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType, types.MethodWrapperType)


def is_of_torch(func: Callable[..., Any]) -> bool:
    """Whether a function that a mode is called with is torch's own."""
    if isinstance(func, _BUILTIN):
        return True
    code = getattr(func, "__code__", None)
    return code is not None and code.co_filename.startswith(_OF_TORCH)


def function_called(func: Callable[..., Any]) -> Callable[..., Any]:
    """In `__torch_function__`: the function that is called, where a mode is given what user code has put in its place.

    A function of `torch.nn.functional` names itself to modes by the module's global. If that was replaced by a function
    that calls it (`F.cross_entropy = lambda *args: 2 * own(*args)`), a mode that calls what it is given doubles twice.

    Args:
        func: what the mode is given; one of torch itself is returned as it is.
    """
    frame = sys._getframe(1)
    while frame.f_code is not torch.overrides.handle_torch_function.__code__:
        if frame.f_back is None:
            return func
        frame = frame.f_back
    called = frame.f_back
    if called is None or called.f_code is getattr(func, "__code__", None):
        return func
    names = next((module for module in _FUNCTIONAL if called.f_globals is module), {})
    if names.get(called.f_code.co_name) is not func or called.f_code.co_freevars:
        return func
    # One that was replaced before this module was imported gets all its arguments by the call.
    return _BY_CODE.get(called.f_code) or types.FunctionType(called.f_code, called.f_globals)
