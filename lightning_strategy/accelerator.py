"""`XLAEagerAccelerator`: whatever PJRT device the process has."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.accelerators import XLAAccelerator

from lightning_strategy.refusals import check_devices
from xla_adapters import get_backend

_STRATEGY = "XLAEagerStrategy"
_MEGABYTE = 1024.0 * 1024.0


class XLAEagerAccelerator(XLAAccelerator):
    """The accelerator behind `XLAEagerStrategy` and `XLAEagerFabricStrategy`.

    Lightning's own counts the TPUs on the PCI bus and refuses every other device. It is derived from
    because Lightning evaluates under `inference_mode` with any other kind, and XLA's views do not
    work on inference tensors.
    """

    @staticmethod
    def is_available() -> bool:  # type: ignore[override]
        """Always: XLA runs on the CPU too."""
        return True

    @staticmethod
    def auto_device_count() -> int:  # type: ignore[override]
        """One: under sharding, too, Lightning sees one device that stands for all."""
        return 1

    @staticmethod
    def parse_devices(devices: Any) -> int:
        """One device for Lightning, whatever it stands for.

        Raises:
            UnsupportedOptionError: several are asked for without sharding.
            ConfigError: under sharding, another number than there is.
        """
        check_devices(devices, _STRATEGY)
        return 1

    @staticmethod
    def get_parallel_devices(devices: Any) -> list[torch.device]:
        """The one device."""
        return [get_backend().device()]

    @staticmethod
    def name() -> str:
        """As in log messages of Lightning."""
        return "xla"

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        """Memory of the device in MB by name, or of the process where the device does not tell."""
        info = get_backend().memory_info()
        if info:
            return {f"{name} (MB)": value / _MEGABYTE for name, value in info.items()}
        return {"peak process memory (MB)": _resident_bytes() / _MEGABYTE}


def _resident_bytes() -> float:
    import resource
    import sys

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Linux counts it in kilobytes, macOS in bytes.
    return float(peak if sys.platform == "darwin" else peak * 1024)
