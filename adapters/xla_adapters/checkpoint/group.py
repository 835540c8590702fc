"""The processes that save together: what one of them decides, all do."""

from __future__ import annotations

from typing import Any, Protocol


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
    """

    def __init__(self, group: Any = None) -> None:
        import torch.distributed

        self._distributed = torch.distributed
        self._group = group
        self.rank = torch.distributed.get_rank(group)
        self.size = torch.distributed.get_world_size(group)

    def gather(self, value: Any) -> list[Any]:
        """See `Group`."""
        values: list[Any] = [None] * self.size
        self._distributed.all_gather_object(values, value, group=self._group)
        return values
