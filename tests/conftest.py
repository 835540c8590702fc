"""Imports everything once, so that tests can fork; and fails tests that leak into their neighbours."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator

os.environ.setdefault("PJRT_DEVICE", "CPU")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Compiling is most of what the tests do. The graphs and the passes of XLA are the same; only LLVM does less.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

import datasets  # noqa: F401
import lightning.pytorch  # noqa: F401
import peft  # noqa: F401
import pytest
import sklearn.datasets  # noqa: F401
import torch  # noqa: F401
import torch_xla
import torchmetrics  # noqa: F401
import transformers  # noqa: F401

import hf_trainer  # noqa: F401
import lightning_strategy  # noqa: F401

# Children neither look through nor copy what the imports made: a third of what a test of a trainer takes.
gc.collect()
gc.freeze()


@pytest.fixture(autouse=True)
def _leaves_nothing_behind() -> Iterator[None]:
    """A test must leave the environment and the threads of this process as they were."""
    environment, threads = dict(os.environ), set(threading.enumerate())
    yield
    changed = {
        name
        for name in {*environment, *os.environ}
        if environment.get(name) != os.environ.get(name) and name != "PYTEST_CURRENT_TEST"
    }
    started = [thread.name for thread in set(threading.enumerate()) - threads if not thread.daemon]
    assert not changed, f"the test changed environment variables: {sorted(changed)}"
    assert not started, f"the test left threads running: {started}"
    if torch_xla._XLAC._xla_runtime_is_initialized():
        # Every child forked from here on would hang.
        pytest.exit("a test touched the XLA runtime outside a child: decorate it with @isolated", returncode=1)
