"""Imports everything once, so that tests can fork; and fails tests that leak into their neighbours."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from tests.device import ON_TORCH_TPU

os.environ.setdefault("PJRT_DEVICE", "CPU")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Tests count compiles, and those of the cache say where it is.
os.environ.setdefault("XLA_ADAPTERS_CACHE_DIR", "off")
# Compiling is most of what the tests do. The graphs that are traced are the same; XLA emits and optimizes the code of
# kernels in a shorter way, and expands all scatters. Tests of rounding ask for XLA's defaults.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_backend_optimization_level=0"
    + ("" if ON_TORCH_TPU else " --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"),
)

if ON_TORCH_TPU:
    from tests.torch_tpu import session
    from tests.torch_tpu.session import pytest_collection_modifyitems, pytest_terminal_summary  # noqa: F401
else:
    import datasets  # noqa: F401
    import peft  # noqa: F401
    import pygal  # noqa: F401
    import sklearn.datasets  # noqa: F401

import lightning.pytorch  # noqa: F401
import numpy
import pytest
import torch
import torchmetrics  # noqa: F401
import transformers.models.gpt2.modeling_gpt2  # noqa: F401

import hf_trainer  # noqa: F401
import lightning_strategy  # noqa: F401
import xla_adapters.checkpoint.manifest
import xla_adapters.replay.safety.allowlist
import xla_adapters.utils.pages
from tests.isolation import run_in_child

# What every child that replays, saves or reports would look up anew.
xla_adapters.replay.safety.allowlist.is_allowed(len)
xla_adapters.checkpoint.manifest.versions(("transformers", "accelerate", "lightning"))
xla_adapters.utils.pages.templates()

# None that a test sets itself.
_SEED = 2_718_281
_TASKS = Path("/proc/self/task")


def pytest_collection_finish() -> None:
    """Children neither look through nor copy what imports and collection made: a third of a trainer's test."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _leaves_nothing_behind() -> Iterator[None]:
    """A test must leave the environment and the threads of this process as they were, and draws the same numbers."""
    environment, threads = dict(os.environ), set(threading.enumerate())
    _draw_from_the_beginning()
    # What earlier tests have left, such as their reports.
    gc.freeze()
    yield
    # In both cases children forked from here on would hang, some or all.
    if _runtime_is_started():
        pytest.exit("a test touched the XLA runtime outside a child: mark it as isolated", returncode=1)
    if pool := _left_running():
        pytest.exit(
            f"a test left threads of a library running ({', '.join(pool)}), as torch does that computes: "
            f"mark it as isolated",
            returncode=1,
        )
    changed = {
        name
        for name in {*environment, *os.environ}
        if environment.get(name) != os.environ.get(name) and name != "PYTEST_CURRENT_TEST"
    }
    started = [thread for thread in set(threading.enumerate()) - threads if not thread.daemon]
    for thread in started:
        # One that has done all may not have come to its end.
        thread.join(60)
    left = [thread.name for thread in started if thread.is_alive()]
    assert not changed, f"the test changed environment variables: {sorted(changed)}"
    assert not left, f"the test left threads running: {left}"


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs a test with the mark `isolated` in a forked child."""
    __tracebackhide__ = True
    mark = pyfuncitem.get_closest_marker("isolated")
    if mark is None or hasattr(pyfuncitem.obj, "runs_in_a_child"):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    run_in_child(functools.partial(pyfuncitem.obj, **arguments), **mark.kwargs)
    return True


def _draw_from_the_beginning() -> None:
    """What a test draws without a seed of its own is the same in each run, and whatever ran before it."""
    random.seed(_SEED)
    numpy.random.seed(_SEED)
    # Not torch.manual_seed, which is the device's, too.
    torch.default_generator.manual_seed(_SEED)


def _runtime_is_started() -> bool:
    if ON_TORCH_TPU:
        return session.is_started()
    import torch_xla

    return bool(torch_xla._XLAC._xla_runtime_is_initialized())


def _left_running() -> list[str]:
    """Names of native threads started since: of OpenMP's a forked child has none, and waits for them forever."""
    for _ in range(3000):
        # One of Python's is unknown to it for the moment in which it ends; one of pyarrow's allocator does no harm.
        left = [name for task, name in _native_threads().items() if task not in _AT_FIRST and name != "jemalloc_bg_thd"]
        if not left:
            break
        time.sleep(0.02)
    return left


def _native_threads() -> dict[str, str]:
    """Names of the threads that Python did not start, by their number."""
    known = {str(thread.native_id) for thread in threading.enumerate()}
    names = {}
    for task in set(os.listdir(_TASKS)) - known:
        # It may end before its name is opened, or before it is read.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            names[task] = (_TASKS / task / "comm").read_text().strip()
    return names


# For what modules of tests draw when they are imported.
_draw_from_the_beginning()

# Of libraries that end theirs before a fork (OpenBLAS).
_AT_FIRST = set(_native_threads())
