"""The runtime interface between this package and the device runtime."""

from __future__ import annotations

import copyreg
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal, get_args

from xla_adapters.config import CacheDir, check_cache_dir
from xla_adapters.errors import ConfigError, RuntimeOrderError, UnsupportedOptionError
from xla_adapters.utils import load_late

if TYPE_CHECKING:
    from xla_adapters.runtime.interface import CompiledMemory, Device, Metrics, Runtime, RuntimeEvent
    from xla_adapters.runtime.tile_assignment import Part, TileAssignment

__all__ = [
    "CompiledMemory",
    "Device",
    "Metrics",
    "Part",
    "Runtime",
    "RuntimeEvent",
    "TileAssignment",
    "check_mode",
    "eager",
    "get_runtime",
    "initialize",
    "prepare",
    "runtime_name",
    "switch_eager",
    "using_runtime",
]

# Where the names are that need torch: imported when they are used, so that the command line answers at once.
_HOMES = {
    "CompiledMemory": "interface",
    "Device": "interface",
    "Metrics": "interface",
    "Part": "tile_assignment",
    "Runtime": "interface",
    "RuntimeEvent": "interface",
    "TileAssignment": "tile_assignment",
}

RuntimeName = Literal["torch_xla", "torch_tpu"]
_NAMES: tuple[str, ...] = get_args(RuntimeName)
# Modes of torch_xla: its own lazy one, and its dynamo backend.
_OF_LAZY_TENSORS = ("lazy", "eager+dynamo")
_runtime: Runtime | None = None


def __getattr__(name: str) -> Any:
    return load_late(__name__, _HOMES, name)


def installed_runtime() -> str:
    """The name of the runtime that is installed; nothing is imported.

    Raises:
        ConfigError: none is, or both are.
    """
    found = [name for name in _NAMES if find_spec(name) is not None]
    if len(found) == 1:
        return found[0]
    if not found:
        raise ConfigError(
            'neither torch_xla nor torch_tpu is installed: pip install "xla-adapters[xla]" (torch_xla 2.9) or '
            '"xla-adapters[torch-tpu]" (TorchTPU, experimental)'
        )
    raise ConfigError(
        "torch_xla and torch_tpu are both installed, and a process can use one of them: say which by "
        'xla_adapters.initialize(runtime="torch_xla") or xla_adapters.initialize(runtime="torch_tpu") as the first '
        "call, or uninstall one"
    )


def make_runtime(name: str) -> Runtime:
    """Imports a runtime.

    Raises:
        ConfigError: there is none of this name, or it is not installed.
    """
    if name not in _NAMES:
        raise ConfigError(f"runtime={name!r} is not a valid value; valid values: {', '.join(map(repr, _NAMES))}")
    if find_spec(name) is None:
        raise ConfigError(f"runtime={name!r}: {name} is not installed")
    if name == "torch_tpu":
        from xla_adapters.runtime.torch_tpu.runtime import make_runtime as make
    else:
        with _without_root_handler():
            from xla_adapters.runtime.torch_xla.runtime import make_runtime as make
    return _shared(make())


def _shared(runtime: Runtime) -> Runtime:
    """A runtime of which a copy, in this process or another, is the one in use there."""
    copyreg.pickle(type(runtime), _copied)
    return runtime


@contextmanager
def _without_root_handler() -> Iterator[None]:
    """Removes the handler that the import of torch_xla gives the root logger (by `logging.basicConfig()`).

    With it loggers that have a handler (Lightning's) say everything twice, and `basicConfig` of the program does
    nothing. accelerate may have imported torch_xla before; then the handler is known by its format.
    """
    root = logging.getLogger()
    kept = list(root.handlers)
    if "torch_xla" in sys.modules and root.level == logging.WARNING:
        kept = [handler for handler in kept if not _is_of_basic_config(handler)]
    yield
    root.handlers[:] = [handler for handler in root.handlers if handler in kept]


def _is_of_basic_config(handler: logging.Handler) -> bool:
    formatter = handler.formatter
    return type(handler) is logging.StreamHandler and formatter is not None and formatter._fmt == logging.BASIC_FORMAT


def get_runtime() -> Runtime:
    """The runtime in use: torch_xla or torch_tpu, whichever is installed, imported at the first call.

    Raises:
        ConfigError: none or both are installed, and `initialize(runtime=...)` has not chosen one.
    """
    global _runtime
    if _runtime is None:
        _runtime = make_runtime(installed_runtime())
    return _runtime


def runtime_name() -> str:
    """The name of the runtime that `get_runtime` returns, which is not imported for it.

    Raises:
        ConfigError: none is installed, or both are and none was chosen.
    """
    return installed_runtime() if _runtime is None else _runtime.name


def _choose(name: str) -> None:
    """Puts the runtime of this name in use."""
    global _runtime
    if _runtime is None:
        _runtime = make_runtime(name)
    elif _runtime.name != name:
        raise RuntimeOrderError(
            f"initialize(runtime={name!r}): {_runtime.name} is in use already. Call "
            f"xla_adapters.initialize(runtime={name!r}) before anything else of this package, its trainers and "
            "strategies too"
        )


def _copied(runtime: Runtime) -> tuple[Callable[[], Runtime], tuple[()]]:
    return get_runtime, ()


def prepare() -> None:
    """Sets what the device runtime reads as it starts (`XLA_FLAGS`), for programs in which another library starts it.

    Importing `hf_trainer` calls it, since `transformers.TrainingArguments` start the runtime.
    """
    from xla_adapters.runtime.extensions import extensions

    device = get_runtime().device
    device.prepare()
    for extension in extensions():
        extension.prepare(device)


def initialize(
    *,
    runtime: RuntimeName | None = None,
    spmd: bool = False,
    eager: bool = True,
    fast_compile: bool = False,
    keep_memory: bool | None = None,
    cache_dir: CacheDir = None,
) -> None:
    """Starts the device runtime and switches the process to eager mode.

    HF's Trainer and the Lightning strategies do both when they are constructed; a step starts the runtime. Call it
    outside of steps. From then on safetensors, and so `save_pretrained`, can save a model that is on the device.

    Args:
        runtime: the library that drives the device, `"torch_xla"` or `"torch_tpu"`; only needed if both are installed.
        spmd: drive all devices of the process as one (needed for sharding).
        eager: execute each operation outside of steps at once, as PyTorch does on other devices, for the rest of the
            process. False leaves the mode as it is; torch_xla's own is lazy, in which operations are collected until
            something reads a value or calls `torch_xla.sync()`.
        fast_compile: on CPU devices, leaves out XLA's slowest compiler pass (through `XLA_FLAGS`), which shortens the
            compile of deep models. Sums round more, and wide models may take longer in each step
            (docs/results/performance.md).
        keep_memory: on CPU devices, whether the process keeps the memory that a step frees (glibc's `mallopt`) instead
            of returning it to the system: 24 layers of a GPT-2 took 0.65 of the CPU time. None keeps it, unless the
            environment configures the allocator (`MALLOC_TRIM_THRESHOLD_` and the like, `GLIBC_TUNABLES`). If the
            runtime has not started yet, XLA is asked (through `XLA_FLAGS`) for pieces that can be kept, as
            `import hf_trainer` does, too. It can be changed at any time; memory that was kept may stay. Trainers and
            steps use the same setting.
        cache_dir: a folder in which compiled programs are kept, so that a later process loads them instead of
            compiling them again (docs/guides/warm_start.md). None is the folder in the variable
            `XLA_ADAPTERS_CACHE_DIR` or, on devices that are no CPU, one in your cache directory; False is none. On CPU
            devices it needs the package xla-cpu-pjrt, whose devices then take the place of torch_xla's own.

    Raises:
        RuntimeOrderError: a device was already used without what is asked for, or with another runtime.
        ConfigError: no runtime is installed, or both are and `runtime` is not given; a value of `cache_dir` that is
            none; `fast_compile` or `keep_memory`
            on a device that is no CPU, `fast_compile` that is no bool, or `keep_memory` without glibc.
    """
    from xla_adapters.runtime.interface.device import Tuning
    from xla_adapters.runtime.patches import parametrize_by_copying, save_from_device, use_attention_masks_as_given

    if runtime is not None:
        _choose(runtime)
    used = get_runtime()
    check_cache_dir(cache_dir)
    used.device.use_compile_cache(cache_dir)
    used.device.initialize(spmd=spmd, tuning=Tuning(fast_compile=fast_compile, keep_memory=keep_memory))
    save_from_device(used)
    use_attention_masks_as_given()
    parametrize_by_copying()
    if eager:
        switch_eager(True)


def switch_eager(enabled: bool) -> None:
    """Switches eager mode on or off, for the process.

    Where it goes on, what is pending is executed: a replay would overwrite buffers that a pending value reads, and
    looks for pending values in lazy mode only.
    """
    tracing = get_runtime().tracing
    was_lazy = not tracing.eager()
    tracing.set_eager(enabled)
    if enabled and was_lazy:
        tracing.flush()


@contextmanager
def using_runtime(runtime: Runtime) -> Iterator[Runtime]:
    """Puts another runtime in place for the duration of the context (tests, successors)."""
    global _runtime
    previous, _runtime = _runtime, _shared(runtime)
    try:
        yield runtime
    finally:
        _runtime = previous


def check_mode(xla_mode: str) -> None:
    """Raises if the runtime does not have a mode.

    Raises:
        UnsupportedOptionError: with the modes that it has.
    """
    runtime = get_runtime()
    if xla_mode in _OF_LAZY_TENSORS and not runtime.has_lazy_tensors:
        raise UnsupportedOptionError(
            f"xla_mode={xla_mode!r}: {runtime.name} has no lazy tensors; use 'eager+compile' (the default) or 'eager'"
        )


@contextmanager
def eager(enabled: bool = True) -> Iterator[None]:
    """Executes operations at once inside the context.

    Where it begins, what was traced before is executed. At the exit the mode is as before.

    Args:
        enabled: False has torch_xla trace operations outside of steps, too, until a value is read or
            `torch_xla.sync()` is called.
    """
    get_runtime().device.initialize()
    previous = get_runtime().tracing.eager()
    try:
        switch_eager(enabled)
        yield
    finally:
        switch_eager(previous)
