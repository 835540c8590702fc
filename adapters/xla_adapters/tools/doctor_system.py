"""`System`: the versions, the machine and the environment that a training runs with."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, requires, version

_PACKAGE = "xla-adapters"
_BESIDE = ("libtpu", "jax", "tensorboard")
# The extras of the runtimes and of the frameworks, whose packages are reported.
_EXTRAS = ("xla", "torch-tpu", "hf", "lightning")
# Prefixes and names of variables that torch_xla, XLA, libtpu, glibc or this package read.
_VARIABLES = ("XLA_", "PJRT_", "PT_XLA", "TPU_", "CPU_NUM_DEVICES", "LIBTPU", "MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD")
_MORE_VARIABLES = ("OMP_NUM_THREADS", "ACCELERATE_USE_CPU", "TF_CPP_MIN_LOG_LEVEL")


@dataclass(frozen=True, kw_only=True)
class System:
    """What a training runs with.

    Attributes:
        versions: of Python and the packages, by name; packages that are not installed are absent.
        machine: the processor, its cores, the memory.
        environment: the variables that matter.
        hardware: the kind of device, as PJRT names it; empty if no test found out.
        devices: how many there are.
    """

    versions: Mapping[str, str]
    machine: str
    environment: Mapping[str, str] = field(default_factory=dict)
    hardware: str = ""
    devices: int = 0

    def number(self, package: str) -> tuple[int, int]:
        """The first two numbers of a package's version; (0, 0) if it is not installed."""
        found = re.match(r"(\d+)\.(\d+)", self.versions.get(package.replace("_", "-"), ""))
        return (int(found[1]), int(found[2])) if found else (0, 0)

    def is_set(self, variable: str) -> bool:
        """Whether an environment variable is set to something other than no."""
        return self.environment.get(variable, "").lower() not in ("", "0", "false")


def this_system() -> System:
    """The system of this process; starts no runtime."""
    environment = {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(_VARIABLES) or name in _MORE_VARIABLES
    }
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    machine = f"{platform.platform()}, {os.cpu_count()} cores, {memory:.0f} GiB of memory"
    return System(versions=_versions(), machine=machine, environment=environment)


def _versions() -> dict[str, str]:
    names = [_PACKAGE, *dict.fromkeys(map(_name, _requirements())), *_BESIDE]
    found = {"python": platform.python_version()}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _requirements() -> list[str]:
    """What the package needs, and what its extras for runtimes and frameworks do."""
    wanted = [f"extra == {quote}{extra}{quote}" for extra in _EXTRAS for quote in "'\""]
    try:
        stated = requires(_PACKAGE) or []
    except PackageNotFoundError:
        return ["torch", "torch-xla"]
    return [line for line in stated if "extra ==" not in line or any(extra in line for extra in wanted)]


def _name(requirement: str) -> str:
    found = re.match(r"[\w.-]+", requirement)
    assert found is not None
    return found[0].replace("_", "-")
