"""`CompileCache`: torch_xla's persistent compile cache, where the device can load what is in it."""

from __future__ import annotations

import os
import warnings

import torch_xla.runtime as xr

from xla_adapters.errors import RuntimeOrderError

# Devices on which torch_xla 2.9 loads none of the executables that it has written, and why.
_CANNOT_LOAD = {"CPU": "PJRT has not implemented it there", "TPU": "pytorch/xla#9094"}


class CompileCache:
    """The folder in which a process keeps executables."""

    def __init__(self) -> None:
        self._has_warned = False

    def use(self, folder: str, hardware: str, *, has_started: bool) -> None:
        """See `Device.use_compile_cache`.

        Args:
            folder: where executables are kept.
            hardware: the kind of device.
            has_started: whether the runtime runs.
        """
        if hardware in _CANNOT_LOAD:
            if not self._has_warned:
                self._has_warned = True
                warnings.warn(
                    f"cache_dir={folder!r} has no effect: torch_xla 2.9 cannot load executables on {hardware} devices "
                    f"({_CANNOT_LOAD[hardware]}), so every process compiles again, and nothing is written",
                    UserWarning,
                    stacklevel=4,
                )
        elif os.environ.get("XLA_PERSISTENT_CACHE_PATH") != folder:
            if has_started:
                raise RuntimeOrderError(
                    f"cache_dir={folder!r} was asked for after the XLA runtime had started without it. Call "
                    "xla_adapters.initialize(cache_dir=...) at the start of the program, before a tensor or model is "
                    "moved to the XLA device and before transformers.TrainingArguments are created"
                )
            xr.initialize_cache(folder)
