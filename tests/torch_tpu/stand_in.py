"""Runs torch_tpu on the CPU: its device "tpu" is XLA:CPU, a PJRT plugin for which `shim.c` makes up what TPUs have.

A process puts `environment(folder)` into its environment, and calls `start()` before it uses the device.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
import warnings
from collections.abc import Mapping
from dataclasses import astuple, dataclass, fields
from importlib.util import find_spec
from pathlib import Path

_SHIM = Path(__file__).with_name("shim.c")
# The package that has the plugin, and the one that has the header of PJRT's C API.
_PLUGIN, _HEADER = "fastatomstruct_xla_cpu", "xla_plugins.xla_cpu_pjrt"


@dataclass(frozen=True)
class Counts:
    """Calls of the PJRT plugin by this process.

    Attributes:
        compiles: programs compiled.
        executions: executables launched.
        transfers_to_device, transfers_to_host: copies of one buffer each.
    """

    compiles: int
    executions: int
    transfers_to_device: int
    transfers_to_host: int

    def since(self, before: Counts) -> Counts:
        """The calls after an earlier reading."""
        return Counts(*(now - then for now, then in zip(astuple(self), astuple(before), strict=True)))


def counts() -> Counts:
    """The calls so far; the device must have been used."""
    return Counts(*(_number(field.name).value for field in fields(Counts)))


def fail_launch(number: int = 1) -> None:
    """Has one of the coming launches fail, as if the device had no memory for it.

    Args:
        number: which one; 1 is the next.
    """
    _number("fails_at").value = number


def _number(name: str) -> ctypes.c_long:
    return ctypes.c_long.in_dll(ctypes.CDLL(os.environ["TPU_LIBRARY_PATH"]), f"shim_{name}")


def reason_to_skip() -> str | None:
    """Why torch_tpu cannot run here, as a clause; None if it can."""
    for name in ("torch_tpu", _PLUGIN, _HEADER):
        # The parent first, which `find_spec` would import.
        if find_spec(name.partition(".")[0]) is None:
            return f"{name} is not installed (make test-torch-tpu sets up an environment that has it)"
    if compiler() is None:
        return "there is no C compiler (cc) for the shim of the CPU plugin"
    return None


def compiler() -> str | None:
    """The path of the C compiler."""
    return shutil.which(os.environ.get("CC", "cc"))


def environment(folder: Path) -> Mapping[str, str]:
    """Compiles the shim.

    Args:
        folder: where it is put; must stay while the device is used.

    Returns:
        The environment variables that a process needs before it imports torch.
    """
    program = compiler()
    assert program is not None
    library = folder / "tpu_shim.so"
    options = ["-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", f"-I{_folder(_HEADER) / 'include'}"]
    target = f'-DTARGET="{_folder(_PLUGIN) / "libpjrt_cpu.so"}"'
    subprocess.run([program, *options, target, str(_SHIM), "-o", str(library), "-ldl"], check=True)
    return {
        "TPU_LIBRARY_PATH": str(library),
        # Otherwise it waits for minutes for a server that only Google's machines have.
        "TPU_SKIP_MDS_QUERY": "1",
        # C++ reports what the stand-in lacks and the device does without.
        "TF_CPP_MIN_LOG_LEVEL": "2",
    }


def _folder(package: str) -> Path:
    spec = find_spec(package)
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return Path(next(iter(spec.submodule_search_locations)))


def start() -> None:
    """Makes "tpu" a device of torch, as importing torch does on a machine with a TPU. Computes nothing yet."""
    # That it is slower without tcmalloc, and that the build is not Google's.
    warnings.filterwarnings("ignore", message=".*TorchTpu.*")
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):
        import torch_tpu._loader
        from torch_tpu._internal.utils import hardware

        hardware.get_tpu_device_count = lambda: int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        torch_tpu._loader.load()
