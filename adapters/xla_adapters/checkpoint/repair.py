"""Repairs a folder of checkpoints; no training may be using it."""

from __future__ import annotations

import re
from pathlib import Path

from xla_adapters.checkpoint.commit import is_valid
from xla_adapters.checkpoint.inspection import DAMAGED, check, find, set_aside
from xla_adapters.checkpoint.manifest import MANIFEST, Checkpoint
from xla_adapters.checkpoint.sealing import make_durable, records
from xla_adapters.checkpoint.storage import join
from xla_adapters.checkpoint.store import CheckpointStore
from xla_adapters.errors import CheckpointNotFoundError, CheckpointWriteError

_UNFINISHED = f"{MANIFEST}.unfinished"


def repair(store: CheckpointStore) -> list[str]:
    """Completes or removes interrupted saves, renames damaged checkpoints, and restores renamed ones that are intact.

    Returns:
        What was done, one line for each checkpoint.

    Raises:
        CheckpointWriteError: an operation of the storage failed.
    """
    before = {entry.name for entry in store.storage.entries(store.root)}
    with store.alone(f"{store.root} was not repaired"):
        after = {entry.name for entry in store.storage.entries(store.root)}
        done = [f"completed {name}" for name in sorted(after - before) if not name.startswith((".", "_"))]
        done += [f"removed {name}, which was never finished" for name in sorted(before - after)]
        for found in find(store.storage, store.root, store.prefix):
            checked = check(store.storage, found)
            if checked.problems and checked.is_sealed:
                aside = set_aside(store.storage, store.root, checked)
                done.append(f"set {found.name} aside" + (f" as {aside}" if aside else ", which could not be renamed"))
        done += [f"put {name} back, whose files are all right" for name in _put_back(store)]
    return done


def _put_back(store: CheckpointStore) -> list[str]:
    back = []
    for entry in store.storage.entries(store.root):
        name = re.sub(r"-[0-9a-f]{8}$", "", entry.name.removeprefix(DAMAGED))
        path = join(store.root, entry.name)
        free = store.storage.entry(join(store.root, name)) is None
        if entry.name.startswith(DAMAGED) and free and is_valid(store.storage, path):
            store.storage.rename(path, join(store.root, name))
            store.storage.fsync_folder(store.root)
            back.append(name)
    return back


def adopt(store: CheckpointStore, name: str, *, step: int) -> Checkpoint:
    """Adds a manifest to a checkpoint that other software wrote, from its files as they are now.

    Args:
        store: the store.
        name: of a folder in the store, or of a file that `torch.save` wrote.
        step: number of optimizer steps done when it was saved.

    Raises:
        CheckpointNotFoundError: there is no checkpoint of this name.
        CheckpointWriteError: it has a manifest, or an operation of the storage failed.
    """
    storage, path = store.storage, join(store.root, name)
    entry = storage.entry(path)
    if entry is None:
        raise CheckpointNotFoundError(f"{path}: there is no such checkpoint")
    found = next((item for item in find(storage, store.root, store.prefix) if item.name == name), None)
    if found is not None and found.is_sealed:
        raise CheckpointWriteError(
            f"{path} has a manifest: `xla-adapters checkpoint verify` says what is wrong with it"
        )
    if not entry.is_folder:

        def copy(target: Path) -> None:
            storage.download(path, target)

        return store.save(step, copy, name=name, one_file=True)
    with store.alone(f"{name} was not adopted"):
        make_durable(storage, path)
        manifest = store.manifest(step, records(storage, path))
        if storage.can_rename:
            unfinished = join(path, _UNFINISHED)
            storage.write(unfinished, manifest.encode())
            storage.fsync(unfinished)
            storage.fsync_folder(path)
            storage.rename(unfinished, join(path, MANIFEST))
            storage.fsync_folder(path)
        else:
            storage.write(join(path, MANIFEST), manifest.encode())
    return Checkpoint(path=path, manifest=manifest)
