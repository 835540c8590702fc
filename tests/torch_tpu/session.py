"""A test run on TorchTPU: its device, and which tests of the other folders run on it, too.

The import makes the device, and so must come before that of torch.
"""

from __future__ import annotations

import atexit
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest

from benchmarks.torch_tpu import stand_in

_OBSTACLE = stand_in.obstacle()


if _OBSTACLE is None:
    _folder = tempfile.TemporaryDirectory()
    atexit.register(_folder.cleanup)
    os.environ.update(stand_in.environment(Path(_folder.name)))
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
