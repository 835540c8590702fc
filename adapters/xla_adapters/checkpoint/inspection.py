"""Finds the checkpoints in a folder, and checks them against their manifests."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import uuid
import warnings
from dataclasses import dataclass

from xla_adapters.checkpoint.manifest import MANIFEST, Checkpoint, Manifest
from xla_adapters.checkpoint.sealing import problems, read_manifest
from xla_adapters.checkpoint.storage import Entry, LocalStorage, Storage, join
from xla_adapters.errors import CheckpointDamagedError, CheckpointWarning

DAMAGED = "_damaged-"
# What to do with a folder that somebody changed.
IF_ON_PURPOSE = f"If you changed its files on purpose, remove {MANIFEST} from it, and it is loaded as it is, unchecked"
_ONE_FILE = ".ckpt"


@dataclass(frozen=True, kw_only=True)
class Found:
    """A file or folder that is a checkpoint, or has the name of one.

    Attributes:
        name: in the folder.
        step: from the manifest; without one, the number at the end of the name, if any.
        checkpoint: the checkpoint; None without a readable manifest.
        problems: why it is not a valid checkpoint. Files are only compared by `check`.
        is_sealed: whether it has a manifest, even a damaged one.
    """

    name: str
    step: int | None
    checkpoint: Checkpoint | None
    problems: tuple[str, ...]
    is_sealed: bool


def find(storage: Storage, root: str, prefix: str) -> list[Found]:
    """The checkpoints in a folder by step, and what has the name of one (`prefix` and a number, or `.ckpt`).

    Only manifests are read.
    """
    names = re.compile(rf"{re.escape(prefix)}\d+(\.r\d+)?|.*{re.escape(_ONE_FILE)}")
    found = []
    for entry in storage.entries(root):
        if entry.name.startswith((".", "_")) or (not entry.is_folder and not entry.name.endswith(_ONE_FILE)):
            continue
        item = look_at(storage, root, join(root, entry.name), entry)
        if item.is_sealed or names.fullmatch(entry.name):
            found.append(item)
    return sorted(found, key=_age)


def look_at(storage: Storage, root: str, path: str, entry: Entry) -> Found:
    """Reads the manifest of what is at a path; files are not read."""
    number = re.search(r"(\d+)(\.r\d+)?$", entry.name.removesuffix(_ONE_FILE))
    step, is_sealed = int(number[1]) if number else None, True
    try:
        manifest = read_manifest(storage, path)
        if manifest is not None:
            checkpoint = Checkpoint(path=path, manifest=manifest)
            return Found(name=entry.name, step=manifest.step, checkpoint=checkpoint, problems=(), is_sealed=True)
        is_sealed = False
        problem = (
            f"it has no manifest ({MANIFEST}): somebody else wrote it, or the manifest is lost. If you trust it: "
            f"xla-adapters checkpoint repair {root} --adopt {entry.name}"
        )
    except CheckpointDamagedError as error:
        problem = str(error)
    except OSError as error:
        problem = f"the manifest cannot be read: {error}"
    return Found(name=entry.name, step=step, checkpoint=None, problems=(problem,), is_sealed=is_sealed)


def check(storage: Storage, found: Found) -> Found:
    """The same, with its files compared with the manifest."""
    if found.checkpoint is None:
        return found
    wrong = tuple(problems(storage, found.checkpoint.path, found.checkpoint.manifest))
    return dataclasses.replace(found, problems=wrong)


def verify(path: str | os.PathLike[str]) -> Manifest | None:
    """Compares a checkpoint on this machine (a folder or a file) with its manifest.

    Returns:
        The manifest; `None` if there is none, so that the checkpoint cannot be verified.

    Raises:
        CheckpointDamagedError: the checkpoint is not what was written.
    """
    storage, real = LocalStorage(), os.path.realpath(path)
    try:
        manifest = read_manifest(storage, real)
        wrong = [] if manifest is None else problems(storage, real, manifest)
    except CheckpointDamagedError as error:
        raise CheckpointDamagedError(f"{os.fspath(path)} is damaged: {error}") from error
    if wrong:
        hint = f". {IF_ON_PURPOSE}" if os.path.isdir(real) else ""
        raise CheckpointDamagedError(f"{os.fspath(path)} is damaged: {'; '.join(wrong)}{hint}")
    return manifest


def set_aside(storage: Storage, root: str, damaged: Found) -> str | None:
    """Renames a damaged checkpoint so that nothing resumes from it, and warns; `None` if it cannot be renamed."""
    path, target = join(root, damaged.name), f"{DAMAGED}{damaged.name}"
    if storage.entry(join(root, target)) is not None:
        target = f"{target}-{uuid.uuid4().hex[:8]}"
    aside: str | None = None
    if storage.can_rename:
        with contextlib.suppress(OSError):
            storage.rename(path, join(root, target))
            aside = target
            storage.fsync_folder(root)
    warn_of(path, f"is damaged and was {f'renamed to {target}' if aside else 'passed over'}", damaged)
    return aside


def warn_of(path: str, what: str, found: Found) -> None:
    """Warns why a checkpoint is skipped."""
    warnings.warn(f"checkpoint {path} {what}: {'; '.join(found.problems)}", CheckpointWarning, stacklevel=2)


def _age(found: Found) -> tuple[bool, int, str, str]:
    created = found.checkpoint.manifest.created if found.checkpoint is not None else ""
    # A checkpoint without a known step may be the newest: it sorts last, so that a resume looks at it first and warns.
    return found.step is None, found.step or 0, created, found.name
