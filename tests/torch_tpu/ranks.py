"""Runs a function on several ranks: forked children that are the chips of one machine; see `shim_ranks.h`."""

from __future__ import annotations

import os
import socket
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from tests import children
from tests.isolation import ChildFailed, _not_the_tests_time

# Seconds; ranks that still compute then have so many times as long.
_TIMEOUT, _DEADLINE_FACTOR = 240.0, 6.0
# Seconds after which a launch gives up waiting for the other ranks.
_LAUNCH_DEADLINE = os.environ.get("SHIM_DEADLINE", "60")


def rank() -> int:
    """The number of this process among the ranks."""
    return int(os.environ["RANK"])


def outcomes_on_ranks(
    count: int,
    function: Callable[[], Any],
    *,
    timeout: float = _TIMEOUT,
    env: Mapping[str, str] | None = None,
    meanwhile: Callable[[Sequence[children.Child]], None] | None = None,
) -> list[children.Outcome]:
    """How a function ended on each rank, with the variables that torchrun and TorchTPU's launcher set.

    Args:
        count: of ranks.
        function: its value is pickled.
        timeout: seconds after which all are killed unless they still compute.
        env: further environment variables.
        meanwhile: called again and again with the running ranks, for example to kill one.
    """
    with ExitStack() as stack:
        stack.enter_context(_not_the_tests_time())
        shared = stack.enter_context(tempfile.NamedTemporaryFile(dir="/dev/shm"))
        ports = _free_ports(count + 1)
        variables = {
            "SHIM_RANKS": shared.name,
            "SHIM_DEADLINE": _LAUNCH_DEADLINE,
            "WORLD_SIZE": str(count),
            "LOCAL_WORLD_SIZE": str(count),
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": str(ports[0]),
            "TORCH_TPU_SLICEBUILDER_ADDRESSES": ",".join(f"localhost:{port}" for port in ports[1:]),
            "TORCH_TPU_TOPOLOGY": {1: "1,1,1", 2: "1,2,1", 4: "2,2,1", 8: "2,4,1"}[count],
            "TORCH_TPU_DEVICES_PER_HOST": str(count),
            **(env or {}),
        }
        started: list[children.Child] = []
        try:
            for number in range(count):
                started.append(children.Child(function, {**variables, "RANK": str(number), "LOCAL_RANK": str(number)}))
            _wait(started, timeout, meanwhile)
        finally:
            for child in started:
                child.kill("still running, killed")
        return [child.outcome() for child in started]


def on_ranks(count: int, function: Callable[[], Any], **options: Any) -> list[Any]:
    """What a function returns on each rank. See `outcomes_on_ranks`.

    Raises:
        ChildFailed: it raised on a rank, or a rank died or hung.
    """
    __tracebackhide__ = True
    ended = outcomes_on_ranks(count, function, **options)
    failed = [
        f"--- rank {number}: {outcome.error}\n--- its output ---\n{outcome.output}"
        for number, outcome in enumerate(ended)
        if not outcome.ok
    ]
    if failed:
        raise ChildFailed("\n".join(failed))
    return [outcome.value for outcome in ended]


def _wait(
    started: Sequence[children.Child], timeout: float, meanwhile: Callable[[Sequence[children.Child]], None] | None
) -> None:
    began = time.monotonic()
    computed = 0.0
    while not all(child.ended() for child in started):
        time.sleep(0.01)
        if meanwhile is not None:
            meanwhile(started)
        if time.monotonic() - began < timeout:
            continue
        now = sum(child.cpu_seconds() for child in started)
        # Ranks that wait for each other look a little at whether the others have come.
        if now - computed < 0.5 or timeout > _DEADLINE_FACTOR * _TIMEOUT:
            return
        computed, timeout = now, timeout + 20


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("localhost", 0))
        return [one.getsockname()[1] for one in sockets]
