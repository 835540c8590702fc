"""`live_tensors`: all tensors on the device that Python can reach."""

from __future__ import annotations

import gc
import sys
import threading
import time

import torch

import xla_adapters
from tests.isolation import isolated

SECONDS = 5


@isolated
def test_host_tensors_that_other_threads_destroy_are_left_alone() -> None:
    """Views whose base only C++ holds, as a checkpoint in the background makes them."""
    xla_adapters.initialize()
    live_tensors = xla_adapters.get_runtime().tracing.live_tensors
    ended = threading.Event()

    def make_views() -> None:
        source = torch.zeros(64)
        while not ended.is_set():
            source.detach().reshape(-1).view(torch.uint8)

    # What is frozen is not looked at: many more looks in the same time.
    gc.freeze()
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    threads = [threading.Thread(target=make_views) for _ in range(2)]
    for thread in threads:
        thread.start()
    looks = 0
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        live_tensors()
        looks += 1
    ended.set()
    for thread in threads:
        thread.join()
    sys.setswitchinterval(before)
    gc.unfreeze()
    assert looks > 1000
