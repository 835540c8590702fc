"""The command `xla-adapters checkpoint`: lists, verifies, repairs and consolidates checkpoints; no training may run."""

from __future__ import annotations

import argparse
import re
import sys
import warnings
from pathlib import Path

from xla_adapters.checkpoint.commit import TEMPORARY, TRASH, UPLOADING, is_valid
from xla_adapters.checkpoint.manifest import (
    DAMAGED,
    MANIFEST,
    Checkpoint,
    Found,
    check,
    find,
    look_at,
    make_durable,
    records,
    set_aside,
)
from xla_adapters.checkpoint.storage import in_words, join
from xla_adapters.checkpoint.store import CheckpointStore
from xla_adapters.errors import (
    CheckpointDamagedError,
    CheckpointNotFoundError,
    CheckpointWarning,
    CheckpointWriteError,
    ConfigError,
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Gives the parser of the command `checkpoint` its subcommands."""
    own = parser.add_subparsers(dest="checkpoint_command", required=True)
    for name, run, text in (
        ("list", _list, "lists the checkpoints in a folder; reads manifests only"),
        ("verify", _verify, "reads every byte; exit status 1 if something is not what was written"),
        ("repair", _repair, "completes interrupted saves, sets damaged checkpoints aside, restores intact ones"),
        ("consolidate", _consolidate, "writes whole tensors from a sharded checkpoint"),
    ):
        command = own.add_parser(name, help=text, description=text)
        command.set_defaults(run=run)
        command.add_argument("folder", metavar="DIR", help="a folder of checkpoints, a checkpoint, or the URL of one")
        if name == "repair":
            command.add_argument(
                "--adopt", metavar="NAME", help="add a manifest to this checkpoint, of its files as they are"
            )
            command.add_argument("--step", type=int, help="of the adopted checkpoint (default: the number in its name)")
        if name == "consolidate":
            command.add_argument(
                "output", help="a folder, for the weights as safetensors; or a file ending in .pt, for everything"
            )
            command.add_argument("--key", default="model", help="under which the weights were saved (model)")
            command.add_argument("--max-shard-size", default="5GB", help="of one file of weights (5GB)")


def _store(options: argparse.Namespace) -> CheckpointStore:
    store = CheckpointStore(options.folder)
    if store.storage.entry(store.root) is None:
        raise CheckpointNotFoundError(f"{options.folder}: there is no such folder")
    return store


def _found(store: CheckpointStore) -> list[Found]:
    """The checkpoints in a folder; if the path is a checkpoint itself, that one."""
    entry = store.storage.entry(store.root)
    if entry is not None:
        alone = look_at(store.storage, store.root.rpartition("/")[0], store.root, entry)
        if alone.is_sealed or not entry.is_folder:
            return [alone]
    return store.found()


def _list(options: argparse.Namespace) -> int:
    store = _store(options)
    rows = [("NAME", "STEP", "CREATED", "FILES", "SIZE", "")]
    for found in _found(store):
        step = "?" if found.step is None else str(found.step)
        if found.checkpoint is None:
            rows.append((found.name, step, "", "", "", found.problems[0].split(":")[0]))
            continue
        manifest = found.checkpoint.manifest
        created, size = manifest.created.partition(".")[0].replace("T", " "), in_words(manifest.size)
        rows.append((found.name, step, created, str(len(manifest.files)), size, ""))
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    for row in rows:
        print("  ".join([cell.ljust(width) for cell, width in zip(row[:5], widths, strict=True)] + [row[5]]).rstrip())
    for entry in store.storage.entries(store.root):
        if entry.name.startswith(DAMAGED):
            print(f"{entry.name}: set aside")
        elif entry.name.startswith((TEMPORARY, TRASH, UPLOADING)):
            print(f"{entry.name}: of a save that is running, or was interrupted (repair removes or completes it)")
    return 0


def _verify(options: argparse.Namespace) -> int:
    store, wrong = _store(options), 0
    found = _found(store)
    for item in found:
        checked = check(store.storage, item)
        wrong += bool(checked.problems)
        print(f"{item.name}: ok" if not checked.problems else f"{item.name}: NOT OK: {'; '.join(checked.problems)}")
    if not found:
        print(f"{options.folder}: no checkpoints", file=sys.stderr)
    return 1 if wrong or not found else 0


def _repair(options: argparse.Namespace) -> int:
    store = _store(options)
    if options.adopt is None:
        with warnings.catch_warnings():
            # It is what the lines below say.
            warnings.simplefilter("ignore", CheckpointWarning)
            done = repair(store)
        print("\n".join(done) or "nothing to do")
        return 0
    path = join(store.root, options.adopt)
    entry = store.storage.entry(path)
    if entry is None:
        raise CheckpointNotFoundError(f"{path}: there is no such checkpoint")
    step = options.step if options.step is not None else look_at(store.storage, store.root, path, entry).step
    if step is None:
        raise ConfigError(f"--adopt {options.adopt}: the name does not end in a number; say --step")
    print(f"adopted {adopt(store, options.adopt, step=step).name} as step {step}")
    return 0


def _consolidate(options: argparse.Namespace) -> int:
    # Late: it takes a second to import.
    from xla_adapters.checkpoint.commands import one_sharded_folder, to_one_file
    from xla_adapters.sharding.state import consolidate

    output = Path(options.output)
    if output.suffix not in ("", ".pt"):
        raise ConfigError(f"{output}: give a folder, for the weights as safetensors, or a file ending in .pt")
    store = _store(options)
    entry = store.storage.entry(store.root)
    assert entry is not None
    found = check(store.storage, look_at(store.storage, store.root, store.root, entry))
    if found.is_sealed and found.problems:
        raise CheckpointDamagedError(f"{options.folder}: {'; '.join(found.problems)}")
    if not found.is_sealed:
        print(f"{options.folder} has no manifest: nobody can tell whether it is what was written", file=sys.stderr)
    if output.suffix:
        to_one_file(Path(store.root), output)
        print(output)
    else:
        folder = one_sharded_folder(Path(store.root))
        files = consolidate(folder, output, key=options.key, max_shard_size=options.max_shard_size)
        print("\n".join(map(str, files)))
    return 0


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


def one_sharded_folder(checkpoint: Path) -> Path:
    """The only folder in a checkpoint that torch.distributed.checkpoint wrote.

    Raises:
        CheckpointNotFoundError: there is none, or more than one.
    """
    folders = sorted(path.parent for path in checkpoint.rglob(".metadata"))
    if len(folders) != 1:
        listed = ", ".join(map(str, folders)) or "none"
        raise CheckpointNotFoundError(f"{checkpoint} must hold one sharded state (.metadata); it holds: {listed}")
    return folders[0]


def to_one_file(checkpoint: Path, target: Path) -> None:
    """Writes the whole nested state of a sharded checkpoint with `torch.save`; it must fit into memory.

    For weights alone, one tensor at a time, see `xla_adapters.sharding.state.consolidate`.

    Args:
        checkpoint: its folder.
        target: the file to write.

    Raises:
        CheckpointNotFoundError: there is no sharded state, or more than one.
        CheckpointDamagedError: torch cannot read it.
        CheckpointUnsafeError: a file names code.
    """
    # Late: they take a second to import.
    import torch

    from xla_adapters.sharding.state import load_whole

    folder = one_sharded_folder(checkpoint)
    try:
        state = load_whole(folder)
    except (OSError, RuntimeError, ValueError) as error:
        raise CheckpointDamagedError(f"{folder} cannot be read: {error}") from error
    torch.save(state, target)
