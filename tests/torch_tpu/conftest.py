"""For the environment that `make test-torch-tpu` sets up: TorchTPU on a stand-in for a TPU.

Each test runs in a forked child (`tests.isolation.isolated`), as those of the other environment do: this process
imports everything and never touches the device.
"""

from __future__ import annotations

import atexit
import gc
import os
import tempfile
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks.torch_tpu import stand_in

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# The other environment has no torch_tpu: nothing of this folder is collected there.
collect_ignore_glob = [] if find_spec("torch_tpu") else ["test_*.py"]

_OBSTACLE = stand_in.obstacle()

if _OBSTACLE is None:
    _folder = tempfile.TemporaryDirectory()
    atexit.register(_folder.cleanup)
    os.environ.update(stand_in.environment(Path(_folder.name)))
    stand_in.start()

    import lightning.pytorch  # noqa: F401
    import transformers.models.gpt2.modeling_gpt2  # noqa: F401

    # Children neither look through nor copy what the imports made.
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips those of this folder where the device cannot be had. `items` are those of the whole run."""
    if _OBSTACLE is None:
        return
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=_OBSTACLE))
