"""`DeviceLoader`: batches for an XLA device, without a thread of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch


class DeviceLoader:
    """Stands in for accelerate's `MpDeviceLoaderWrapper`.

    That one reads the dataset in a background thread, which swallows the dataset's exceptions (the
    epoch ends early, as if all were well), syncs the device at each batch, and keeps the last-batch
    flag in thread-local state where the evaluation loop does not see it. Here batches are read in
    the thread that trains and stay on the host; the step moves them to the device while it is
    traced. `dataloader_num_workers` parallelises the reading.

    Args:
        dataloader: accelerate's prepared loader.
        device: the device the batches are meant for.
    """

    def __init__(self, dataloader: Any, device: torch.device) -> None:
        self.dataloader = dataloader
        self.device = device
        for loader in (dataloader, getattr(dataloader, "base_dataloader", dataloader)):
            # Pinned memory is CUDA's; torch warns at each epoch that there is none.
            loader.pin_memory = False

    def __iter__(self) -> Iterator[Any]:
        return iter(self.dataloader)

    def __len__(self) -> int:
        return len(self.dataloader)

    def __getattr__(self, name: str) -> Any:
        if name == "dataloader":
            raise AttributeError(name)
        return getattr(self.dataloader, name)
