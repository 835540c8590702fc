"""`ExclusiveFolder`: changes to a folder of checkpoints are made by one process at a time, and decided by one rank."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

from xla_adapters.checkpoint.commit import Commit
from xla_adapters.checkpoint.group import Group
from xla_adapters.checkpoint.storage import Storage
from xla_adapters.checkpoint.write_failures import room
from xla_adapters.errors import CheckpointError, CheckpointWriteError

_Result = TypeVar("_Result")


class ExclusiveFolder:
    """Gives one caller at a time the right to change a folder, after completing what a dead process left half done.

    Args:
        storage: of the folder.
        root: the folder.
        group: the processes that save together; the first rank acts for all of them.
        commit: completes or removes unfinished saves.
    """

    def __init__(self, storage: Storage, root: str, group: Group, commit: Commit) -> None:
        self._storage = storage
        self._root = root
        self._group = group
        self._commit = commit
        self._lock = threading.RLock()
        self._depth = 0

    @contextmanager
    def alone(self, doing: str, *, create: bool = False) -> Iterator[None]:
        """Holds the folder for the time of a `with` block. May be nested.

        Args:
            doing: begins the message of an error.
            create: whether to make the folder if it does not exist.

        Raises:
            CheckpointWriteError: the storage refuses.
        """
        with self._lock, ExitStack() as stack:
            self.on_first_rank(doing, lambda: self.enter(stack, create=create))
            yield

    def enter(self, stack: ExitStack, *, create: bool = False) -> None:
        """Holds the folder until `stack` is closed. For code that runs on the first rank alone.

        Raises:
            OSError: the storage refuses.
        """
        stack.enter_context(self._lock)
        if self._depth == 0:
            if create:
                self._make(self._root)
            stack.enter_context(self._storage.locked(self._root))
            self._commit.recover()
        self._depth += 1
        stack.callback(self._leave)

    def _leave(self) -> None:
        self._depth -= 1

    def _make(self, path: str) -> None:
        if self._storage.entry(path) is None:
            parent = path.rpartition("/")[0] or "/"
            self._make(parent)
            self._storage.make_folder(path)
            self._storage.fsync_folder(parent)

    def on_first_rank(self, doing: str, action: Callable[[], _Result]) -> _Result:
        """Runs an action on the first rank. All ranks call this, and return or raise what the action did.

        Args:
            doing: begins the message of an error of the storage.
            action: returns a value that can be sent to the other ranks.

        Raises:
            CheckpointWriteError: the storage refuses.
            CheckpointError: (on the other ranks) the action raised on the first rank.
        """
        result: Any = None
        failed: BaseException | None = None
        if self._group.rank == 0:
            try:
                result = action()
            except BaseException as error:  # noqa: BLE001 (raised again, once the other ranks know)
                failed = error
        told, result = self._group.gather((None if failed is None else str(failed), result))[0]
        if isinstance(failed, OSError) and not isinstance(failed, CheckpointError):
            hint = room(str(failed), self._root)
            raise CheckpointWriteError(f"{doing}: {failed}{f'; {hint}' if hint else ''}") from failed
        if failed is not None:
            raise failed
        if told is not None:
            raise CheckpointError(f"rank 0: {told}")
        first: _Result = result
        return first
