"""What Lightning's `ThroughputMonitor`s take for the FLOPs that the devices could do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from lightning.fabric.utilities import throughput
from lightning.pytorch.callbacks import throughput_monitor

from xla_adapters import get_runtime
from xla_adapters.utils.patching import replaced

# Captured on import: a function that a user has put in its place is called as it is.
_STOCK = throughput.get_available_flops


@contextmanager
def flops_of_devices() -> Iterator[None]:
    """Until the exit, `get_available_flops` knows devices that are no TPUs, and counts all TPUs of a mesh.

    Lightning's own function takes every XLA device for a TPU, and asks the metadata server of the TPU which one it is.
    """
    with ExitStack() as stack:
        for module in (throughput, throughput_monitor):
            if vars(module)["get_available_flops"] is _STOCK:
                stack.enter_context(replaced(module, "get_available_flops", _available))
        yield


def _available(device: torch.device, dtype: Any) -> int | None:
    runtime = get_runtime()
    own = runtime.device
    if device.type != own.torch_device().type:
        return _STOCK(device, dtype)
    if runtime.name != "torch_xla" or own.hardware() != "TPU":
        return None
    flops = _STOCK(device, dtype)
    return flops * own.count() if flops is not None and own.is_spmd() else flops
