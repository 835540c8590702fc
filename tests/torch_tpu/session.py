"""A test run on TorchTPU: its device, and which tests of the other folders run on it, too."""

from __future__ import annotations

import atexit
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest

from benchmarks.torch_tpu import stand_in

_OBSTACLE = stand_in.obstacle()


def start() -> None:
    """Makes the device; to be called before torch is imported."""
    if _OBSTACLE is None:
        folder = tempfile.TemporaryDirectory()
        atexit.register(folder.cleanup)
        os.environ.update(stand_in.environment(Path(folder.name)))
        stand_in.start()


def is_started() -> bool:
    """Whether the device was used in this process."""
    if _OBSTACLE is not None:
        return False
    from torch_tpu._internal.device import _device_ops_backend

    return bool(_device_ops_backend._is_initialized())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips all where the device cannot be had."""
    if _OBSTACLE is not None:
        for item in items:
            item.add_marker(pytest.mark.skip(reason=_OBSTACLE))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Says how many tests ran on both runtimes."""
