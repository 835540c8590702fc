"""The private names that checkpoints stand on."""

from __future__ import annotations

import inspect
import threading
from concurrent.futures import thread as pools

from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner


def test_threads_can_be_waited_for_before_pools_end() -> None:
    """The pools of concurrent.futures end in a function registered so; of two the one registered later is first."""
    assert callable(threading._register_atexit)  # type: ignore[attr-defined]
    assert "threading._register_atexit(_python_exit)" in inspect.getsource(pools)
    assert "_threading_atexits" in inspect.getsource(threading._shutdown)  # type: ignore[attr-defined]


def test_a_sharded_state_is_read_without_knowing_it_before() -> None:
    assert callable(_EmptyStateDictLoadPlanner)
    assert {"storage_reader", "planner", "no_dist"} <= set(
        inspect.signature(state_dict_loader._load_state_dict).parameters
    )
    # Not an Exception: it must be named where it is caught.
    assert not issubclass(CheckpointException, Exception)
