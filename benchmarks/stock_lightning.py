"""Lightning's own Trainer on XLA, where there is no TPU."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.accelerators import XLAAccelerator
from lightning.pytorch.strategies import SingleDeviceXLAStrategy


class LiftedAccelerator(XLAAccelerator):
    """Lightning's, without its look for TPUs on the PCI bus."""

    @staticmethod
    def is_available() -> bool:  # type: ignore[override]
        return True

    @staticmethod
    def auto_device_count() -> int:  # type: ignore[override]
        return 1

    @staticmethod
    def parse_devices(devices: Any) -> int:
        return 1

    @staticmethod
    def get_parallel_devices(devices: Any) -> list[torch.device]:
        return [torch.device("xla", 0)]


def stock_on_xla() -> dict[str, Any]:
    """Options of a Trainer."""
    return {"strategy": SingleDeviceXLAStrategy(device=0), "accelerator": LiftedAccelerator(), "devices": 1}
