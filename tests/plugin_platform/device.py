"""The platform "XCPU": XLA's CPU devices behind the PJRT C API, as torch_xla's own CPU devices are not.

torch_xla loads it by an entry point of the group `torch_xla.plugins`; `build` makes one.
"""

from __future__ import annotations

import os

from torch_xla.experimental.plugins import DevicePlugin

LIBRARY_VARIABLE = "XCPU_LIBRARY"


class XCPU(DevicePlugin):
    """What torch_xla asks about the platform; the library's path is in the variable `XCPU_LIBRARY`."""

    def library_path(self) -> str:
        return os.environ[LIBRARY_VARIABLE]

    def client_create_options(self) -> dict[str, int]:
        # As for torch_xla's own CPU devices, so that tests that ask for several get them here, too.
        return {"cpu_device_count": int(os.environ.get("CPU_NUM_DEVICES", "1"))}
