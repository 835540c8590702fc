"""`skipping_saves`: the usual functions save nothing. `FilesWritten`: lists what is written all the same."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from xla_adapters.checkpoint import Checkpoint, CheckpointStore
from xla_adapters.utils.location import line_of_caller
from xla_adapters.utils.patching import replaced

_MOST = 20


@contextmanager
def skipping_saves(folder: Path, skip: Callable[[str], None]) -> Iterator[None]:
    """Has `torch.save` and `save_file` of safetensors write no file, and checkpoint stores change nothing.

    Args:
        folder: a temporary one: a store returns what it has saved, so it saves there.
        skip: called with what was not saved, in words.
    """
    save_checkpoint, elsewhere = CheckpointStore.save, str(folder / "checkpoints")

    def in_memory_only(save: Callable[..., None]) -> Callable[..., None]:
        def saved(value: Any, file: Any, *args: Any, **options: Any) -> None:
            if isinstance(file, (str, os.PathLike)):
                skip(f"{os.fspath(file)} ({line_of_caller()})")
            else:
                save(value, file, *args, **options)

        return saved

    def saved_elsewhere(store: CheckpointStore, step: int, *args: Any, **options: Any) -> Checkpoint:
        skip(f"the checkpoint of step {step} ({line_of_caller()})")
        return save_checkpoint(CheckpointStore(elsewhere), step, *args, **options)

    def not_removed(store: CheckpointStore, *args: Any, **options: Any) -> list[str]:
        return []

    with ExitStack() as stack:
        stack.enter_context(replaced(torch, "save", in_memory_only(torch.save)))
        save_file = in_memory_only(safetensors.torch.save_file)
        stack.enter_context(replaced(safetensors.torch, "save_file", save_file))
        stack.enter_context(replaced(CheckpointStore, "save", saved_elsewhere))
        for name in ("rotate", "remove", "recover"):
            stack.enter_context(replaced(CheckpointStore, name, not_removed))
        yield


class FilesWritten:
    """The files that Python code opens for writing outside of the folder for temporary files, from now on.

    A hook cannot be removed from a process (`sys.addaudithook`), so it belongs in one of its own.

    Args:
        note: called with the path of each, once.
    """

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note
        self._seen: set[str] = set()
        self._ignored = (tempfile.gettempdir() + os.sep, "/dev/", "/proc/", "/sys/")
        sys.addaudithook(self._on_event)

    def _on_event(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, mode, flags = arguments
            writes = any(letter in mode for letter in "wax+") if mode else flags & (os.O_WRONLY | os.O_RDWR)
        elif event == "os.mkdir":
            path, writes = arguments[0], True
        else:
            return
        if not writes or isinstance(path, int) or len(self._seen) >= _MOST:
            return
        full = str(Path(os.fsdecode(path)).absolute())
        if not (full in self._seen or full.startswith(self._ignored) or "__pycache__" in full):
            self._seen.add(full)
            self._note(full)
