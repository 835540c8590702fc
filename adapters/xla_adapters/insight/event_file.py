"""`EventFile`: the events of a run as JSON lines in its folder."""

from __future__ import annotations

import json
import os
import time
import warnings
from pathlib import Path
from typing import Any

NAME = "xla-events.jsonl"


class EventFile:
    """A file to which a line is added for each event. It is created with the first event.

    Each line is one write to the end of the file, so that a run that is killed leaves whole lines, and runs that write
    into one folder do not mix theirs. A file that cannot be written is warned of once; the training goes on.

    Args:
        folder: of the run; None writes nothing.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._descriptor: int | None = None

    @property
    def path(self) -> Path | None:
        """The file; None if nothing is written."""
        return None if self._folder is None else self._folder / NAME

    def write(self, event: str, values: dict[str, Any]) -> None:
        """Adds an event.

        Args:
            event: its name.
            values: what is known of it; must be JSON.
        """
        if self._folder is None:
            return
        line = json.dumps({"event": event, "time": time.time(), **values}) + "\n"
        try:
            os.write(self._open(self._folder), line.encode())
        except OSError as error:
            self._folder = None
            warnings.warn(f"{NAME}: no further events are written: {error}", stacklevel=2)

    def _open(self, folder: Path) -> int:
        if self._descriptor is None:
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / NAME
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            size = os.fstat(self._descriptor).st_size
            # The machine of an earlier run may have stopped in the middle of a line.
            if size and os.pread(self._descriptor, 1, size - 1) != b"\n":
                os.write(self._descriptor, b"\n")
        return self._descriptor

    def close(self) -> None:
        """Closes the file; a further event opens it again."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
