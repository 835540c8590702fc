"""What Lightning's `ThroughputMonitor`s take for the FLOPs that the devices could do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.fabric.utilities import throughput
from lightning.pytorch.callbacks import throughput_monitor

from xla_adapters import get_runtime
from xla_adapters.utils.patching import replaced


@contextmanager
def flops_of_devices() -> Iterator[None]:
    """Until the exit, `get_available_flops` knows devices that are no TPUs, and counts all TPUs of a mesh.

    Lightning's own function takes every XLA device for a TPU, and asks the metadata server of the TPU which one it is.
    """
    stock = throughput.get_available_flops

    def available(device: torch.device, dtype: Any) -> int | None:
        if device.type != "xla":
            return stock(device, dtype)
        own = get_runtime().device
        if own.hardware() != "TPU":
            return None
        flops = stock(device, dtype)
        return flops * own.count() if flops is not None and own.is_spmd() else flops

    with (
        replaced(throughput, "get_available_flops", available),
        replaced(throughput_monitor, "get_available_flops", available),
    ):
        yield
