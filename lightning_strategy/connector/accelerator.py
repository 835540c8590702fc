"""`XLAEagerAccelerator`: the PJRT device of the process, of any kind."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.accelerators import Accelerator, XLAAccelerator

from lightning_strategy.connector.refusals import check_devices
from xla_adapters import get_runtime

_STRATEGY = "XLAEagerStrategy"
_MEGABYTE = 1024.0 * 1024.0


class XLAEagerAccelerator(Accelerator):
    """The accelerator of `XLAEagerStrategy` and `XLAEagerFabricStrategy`.

    Lightning's `XLAAccelerator` counts the TPUs on the PCI bus and refuses every other device. Lightning takes each
    accelerator derived from it for TPUs: only `XLAEagerTPUAccelerator` is.
    """

    def setup_device(self, device: torch.device) -> None:
        """Does nothing: the runtime is started when the strategy is made."""

    def teardown(self) -> None:
        """Does nothing."""

    @staticmethod
    def is_available() -> bool:
        """True: XLA runs on the CPU, too."""
        return True

    @staticmethod
    def auto_device_count() -> int:
        """One, also under sharding: Lightning sees a single device that represents all of them."""
        return 1

    @staticmethod
    def parse_devices(devices: Any) -> int:
        """One device, as Lightning sees it.

        Raises:
            UnsupportedOptionError: several devices without sharding.
            ConfigError: under sharding, another number than there are devices.
        """
        check_devices(devices, _STRATEGY)
        return 1

    @staticmethod
    def get_parallel_devices(devices: Any) -> list[torch.device]:
        """The one device."""
        return [get_runtime().device.torch_device()]

    @staticmethod
    def name() -> str:
        """The name in log messages of Lightning."""
        return "xla"

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        """Memory of the device in MB, by name; the peak of the process if the device does not report it."""
        info = get_runtime().device.memory_info()
        if info:
            return {f"{name} (MB)": value / _MEGABYTE for name, value in info.items()}
        return {"peak process memory (MB)": _resident_bytes() / _MEGABYTE}


class XLAEagerTPUAccelerator(XLAEagerAccelerator, XLAAccelerator):  # type: ignore[misc]
    """The same where the devices are TPUs of torch_xla: Lightning prints how many it uses."""


def make_accelerator() -> XLAEagerAccelerator:
    """The accelerator for the devices of this process. Lightning's own is for TPUs of torch_xla."""
    runtime = get_runtime()
    is_known = runtime.name == "torch_xla" and runtime.device.hardware() == "TPU"
    return XLAEagerTPUAccelerator() if is_known else XLAEagerAccelerator()


def _resident_bytes() -> float:
    import resource
    import sys

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Linux counts it in kilobytes, macOS in bytes.
    return float(peak if sys.platform == "darwin" else peak * 1024)
