"""Which runtime is used: the one that is installed."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Literal, get_args

from xla_adapters.errors import ConfigError
from xla_adapters.runtime.interface import Runtime

RuntimeName = Literal["torch_xla", "torch_tpu"]
_NAMES: tuple[str, ...] = get_args(RuntimeName)


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
        from xla_adapters.runtime.torch_xla.runtime import make_runtime as make
    return make()
