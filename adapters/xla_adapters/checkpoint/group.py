"""`Group`: the processes that save a checkpoint together."""

from __future__ import annotations

from typing import Any, Protocol

from xla_adapters.checkpoint.watchdog import Watchdog


class Group(Protocol):
    """The processes of one run, and how they exchange values.

    Attributes:
        rank: of this process, from 0.
        size: number of processes.
    """

    rank: int
    size: int

    def gather(self, value: Any) -> list[Any]:
        """All-gather: the values of all ranks, by rank. All ranks must call it."""


class OneProcess:
    """A run in a single process, with any number of devices."""

    rank = 0
    size = 1

    def gather(self, value: Any) -> list[Any]:
        """See `Group`."""
        return [value]


class TorchGroup:
    """The processes of a `torch.distributed` group that can send objects (gloo).

    Args:
        group: the default group if not given. Asynchronous saving needs a group that nothing else uses.
        watchdog: raises if another process does not arrive in time.
    """

    def __init__(self, group: Any = None, *, watchdog: Watchdog | None = None) -> None:
        import torch.distributed

        self._distributed = torch.distributed
        self._group = group
        self._watchdog = watchdog if watchdog is not None else Watchdog(None)
        self.rank = torch.distributed.get_rank(group)
        self.size = torch.distributed.get_world_size(group)

    def gather(self, value: Any) -> list[Any]:
        """See `Group`.

        Raises:
            StallError: another process did not arrive before the watchdog's deadline.
        """
        values: list[Any] = [None] * self.size
        with self._watchdog.watch(f"the barrier of rank {self.rank} with {self.size - 1} others"):
            self._distributed.all_gather_object(values, value, group=self._group)
        return values
