"""The processes that save together: what one of them decides, all do."""

from __future__ import annotations

from typing import Any, Protocol

from xla_adapters.checkpoint.watchdog import Watchdog


class Group(Protocol):
    """Processes of one run.

    Attributes:
        rank, size: which of how many this one is.
    """

    rank: int
    size: int

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, on all ranks; all of them call it."""


class OneProcess:
    """A run in one process, whatever the number of its devices."""

    rank = 0
    size = 1

    def gather(self, value: Any) -> list[Any]:
        """See `Group`."""
        return [value]


class TorchGroup:
    """The processes of a `torch.distributed` group that can send objects (gloo).

    Args:
        group: the default one if not given. Asynchronous saving needs one that nothing else uses.
        watchdog: ends each wait for the others, in a save or outside, that takes too long.
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
            StallError: another process did not come before the watchdog's deadline.
        """
        values: list[Any] = [None] * self.size
        with self._watchdog.watch(f"the barrier of rank {self.rank} with {self.size - 1} others"):
            self._distributed.all_gather_object(values, value, group=self._group)
        return values
