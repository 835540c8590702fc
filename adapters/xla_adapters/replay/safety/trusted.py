"""Which code is trusted: libraries whose modules compute only from their arguments and attributes, and functions of
which the user promises it (`replay_safe`).
"""

from __future__ import annotations

import functools
import sys
import sysconfig
import tempfile
import types
import weakref
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from torch import nn

from xla_adapters.utils.location import is_made_up
from xla_adapters.utils.nested_values import ABSENT

# The forward of their modules depends on its arguments and on the attributes of the modules, which are guarded.
TRUSTED_PACKAGES = (
    *("torch", "torch_xla", "torchvision", "transformers", "accelerate", "peft"),
    *("lightning", "lightning_utilities", "torchmetrics", "xla_adapters", "hf_trainer", "lightning_strategy"),
)
# The same of libraries that are no dependencies, with how the versions begin that were read. Their functions are
# followed.
READ_VERSIONS = {
    "diffusers": "0.42.",
    "sentence_transformers": "6.2.",
    "timm": "1.0.",
    "torch_geometric": "2.8.",
    "trl": "1.16.0",
}

_BUILTIN = (
    *(types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType),
    *(types.MethodWrapperType, types.ClassMethodDescriptorType, types.GetSetDescriptorType),
)
_STANDARD_LIBRARY = tuple({f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib")})


@functools.lru_cache(maxsize=4096)
def is_trusted_file(filename: str) -> bool:
    """Whether a file of source code belongs to a trusted package."""
    return _is_in(filename, TRUSTED_PACKAGES) or is_library_file(filename)


@functools.lru_cache(maxsize=4096)
def is_library_file(filename: str) -> bool:
    """Whether a file belongs to a library that is trusted in the version that is installed."""
    read = [name for name, version in READ_VERSIONS.items() if _version(name).startswith(version)]
    # PyG writes a part of its layers into temporary files.
    written = f"{tempfile.gettempdir()}/torch_geometric.nn."
    return _is_in(filename, read) or ("torch_geometric" in read and filename.startswith(written))


def _is_in(filename: str, names: Iterable[str]) -> bool:
    packages = (sys.modules.get(name) for name in names)
    folders = (folder for package in packages if package is not None for folder in getattr(package, "__path__", ()))
    return any(filename.startswith(f"{folder}/") for folder in folders)


def _version(name: str) -> str:
    return str(getattr(sys.modules.get(name), "__version__", ""))


def is_users_file(filename: str) -> bool:
    """Whether a file belongs to no trusted package, nor to the standard library, and its code is no generated one."""
    is_standard = filename.startswith(_STANDARD_LIBRARY) and "-packages/" not in filename
    return not (is_trusted_file(filename) or is_standard or is_made_up(filename))


def is_installed_file(filename: str) -> bool:
    """Whether a file belongs to an installed package, trusted or not."""
    return "/site-packages/" in filename or "/dist-packages/" in filename


def is_trusted(item: Any) -> bool:
    """Whether a function, method, class or module belongs to a trusted package, or is built in.

    Functions are identified by their file, because wrappers copy the names of what they wrap.
    """
    item = getattr(item, "__func__", item)
    if isinstance(item, types.FunctionType):
        wrapped, filename = getattr(item, "__wrapped__", None), item.__code__.co_filename
        # Decorators of the standard library (`functools`) may be around a trusted function.
        return is_trusted_file(filename) if wrapped is None else is_trusted(wrapped) and not is_users_file(filename)
    if isinstance(item, types.ModuleType):
        return is_trusted_file(getattr(item, "__file__", None) or "")
    if isinstance(item, type):
        module = sys.modules.get(item.__module__)
        return item.__module__ == "builtins" or (module is not None and is_trusted(module))
    return isinstance(item, _BUILTIN)


def is_core(cls: type) -> bool:
    """Whether a class is trusted in any version: objects of libraries that were read hold what is not guarded."""
    return is_trusted(cls) and not is_library_file(getattr(sys.modules.get(cls.__module__), "__file__", None) or "")


def is_users_class(cls: type) -> bool:
    """Whether a class belongs to no trusted package, nor to the standard library."""
    module = sys.modules.get(cls.__module__)
    return cls.__module__ != "builtins" and is_users_file(getattr(module, "__file__", None) or "")


def is_users_alone(cls: type) -> bool:
    """Whether only the user's classes are between a module's class and `torch.nn.Module`."""
    return not any(is_trusted(base) and issubclass(base, nn.Module) and base is not nn.Module for base in cls.__mro__)


def lookup(cls: type, name: str) -> Any:
    """The member of a class or its bases, as in their `__dict__`; `ABSENT` if there is none."""
    return next((vars(base)[name] for base in cls.__mro__ if name in vars(base)), ABSENT)


# ---- what the user promises ------------------------------------------------------------------------------

_Function = TypeVar("_Function", bound=Callable[..., Any])

_promised: weakref.WeakSet[Callable[..., Any]] = weakref.WeakSet()


def replay_safe(function: _Function) -> _Function:
    """Promises that a function only computes its result from its arguments. Use it as a decorator.

        @xla_adapters.replay_safe
        def focal(logits, labels, gamma=2.0): ...

    Steps that call it can be replayed, because its code is not followed. Anything else that it reads keeps the value
    from when the step was traced, and its side effects (a print, a counter) happen in traced calls only. The calls that
    are traced to verify replays detect a broken promise (see `on_replay_mismatch`).
    """
    _promised.add(getattr(function, "__func__", function))
    return function


def is_promised(function: Any) -> bool:
    """Whether a function is promised to be safe."""
    return getattr(function, "__func__", function) in _promised
